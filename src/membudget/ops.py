"""Properties of operators that recording needs, determined once per operator.

A schema states which arguments are tensors, which are written to, and which outputs
are views. Properties that schemas omit are listed in this module, each with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    OperatorOverload,
    is_random_operator,
    is_view_operator,
    tree_iter,
)
from membudget.operator_names import common_name

# Uninitialised memory. It is recorded by shape and stride alone: `empty_like(x)` must
# not keep `x`. If such memory is read before any recorded write, then some write was
# not observed.
_EMPTY = frozenset(
    (
        *("aten::empty", "aten::empty_like", "aten::empty_strided"),
        *("aten::empty_permuted", "aten::new_empty", "aten::new_empty_strided"),
    )
)

# Constants in the shape of an argument, whose elements they do not read: `ones_like(x)`
# must not keep `x` or have it recomputed.
_CONSTANT = frozenset(
    (
        *("aten::zeros_like", "aten::ones_like", "aten::full_like"),
        *("aten::new_zeros", "aten::new_ones", "aten::new_full"),
    )
)

# In training, these write running statistics, arguments 3 and 4, and most schemas do
# not declare it. The outputs do not depend on the old statistics, so a replay passes
# scratch memory for them. The number is the position of `training`.
_STATISTICS = {
    "aten::native_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
    "aten::_native_batch_norm_legit_functional": 5,
    "aten::_batch_norm_with_update": None,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
}

# Always kept: routing decisions, e.g. which expert a token goes to. A recomputed
# decision must not differ, and these outputs are small. Also CTC losses, which save a
# table that they fill only in part.
_ROUTING = frozenset(
    (
        *("aten::topk", "aten::sort", "aten::argmax", "aten::argmin", "aten::mode"),
        *("aten::nonzero", "aten::multinomial", "aten::unique_dim", "aten::_unique2"),
        *("aten::unique_consecutive", "aten::searchsorted", "aten::bucketize"),
        *("aten::kthvalue", "aten::median", "aten::bincount", "aten::argsort"),
        *("aten::_ctc_loss", "aten::_cudnn_ctc_loss"),
    )
)

# Namespaces whose operators obey their schemas. Others may write memory that they do
# not declare, or draw from random streams without the tag that says so.
_HONEST_NAMESPACES = frozenset(
    (
        *("aten", "prims", "prim", "profiler", "quantized", "_quantized", "mkldnn"),
        *("mkldnn_prepacked", "onednn", "sparse", "inductor", "rngprims", "symm_mem"),
        *("static_runtime", "c10d", "_c10d_functional", "fsdp", "_dtensor"),
    )
)

# Dtypes of decisions: which expert, which element is the largest, what is masked. Not
# uint8, which oneDNN and cuDNN use for workspaces.
WHOLE = frozenset((torch.bool, torch.int64, torch.int32, torch.int16, torch.int8))

# Queries about a tensor, and profiler events (`torch.profiler.record_function`).
_QUERY_NAMESPACES = frozenset(("prim", "profiler"))

# Communication, which must not happen more often than the other ranks expect, and
# operators that change a storage itself: outputs and written arguments are held.
_OPAQUE_NAMESPACES = frozenset(("c10d", "_c10d_functional", "fsdp", "_dtensor"))
_OPAQUE = frozenset(
    (
        *("aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data"),
        *("aten::_resize_output_", "inductor::resize_storage_bytes_"),
        *("aten::record_stream", "aten::rename_", "aten::sparse_resize_"),
        *("aten::sparse_resize_and_clear_", "aten::copy_sparse_to_sparse_"),
        *("aten::_coalesced_", "aten::squeeze_", "aten::unsqueeze_", "aten::t_"),
        *("aten::transpose_", "aten::as_strided_", "aten::detach_", "aten::swapaxes_"),
        # Offsets count from the start of the storage, which may be another in a replay.
        *("aten::as_strided_copy", "aten::as_strided_scatter"),
    )
)


class OperatorFacts:
    """Properties of one operator overload that recording needs.

    Attributes:
        name: The name that the operator shares with others that do the same.
        tensors: Positions of tensor arguments.
        lists: Positions of arguments that are lists of tensors.
        written: Positions of arguments that the operator writes to.
        written_names: Names of keyword-only arguments that are written, such as `out`.
        has_tensor_keywords: Whether keyword-only arguments may hold tensors.
        returns_fresh: Whether at least one output is not an alias of an argument.
        is_view: Whether the operator returns views of an argument and writes nothing.
        is_random: Whether the operator draws from a random generator.
        is_empty: Whether the operator allocates uninitialised memory.
        is_constant: Whether the operator makes a constant in the shape of its argument.
        is_copy: Whether the operator copies a tensor, possibly to another device.
        is_foreign: Whether the operator is not torch's own and may violate its schema.
        is_gather: Whether the operator gathers the sharded parameters of an FSDP layer.
        is_opaque: Whether a replay must not run the operator again.
        is_query: Whether the operator only queries a tensor or sends the profiler an
            event, so that there is no output to record.
        is_numbered: Whether calls to the operator are numbered in a region; false only
            for `detach` and `alias`, most of whose calls are not observed.
        is_routing: Whether the operator makes a routing decision.
        is_plain_view: Whether the operator returns a view of its only tensor argument.
        is_in_place: Whether the operator writes to its first argument alone.
        is_simple: Whether the operator takes tensors only by position and returns only
            fresh tensors, as most operators do.
        statistics: Tests whether a call updates running statistics; `None` if none can.
    """

    __slots__ = (
        "has_tensor_keywords",
        "is_constant",
        "is_copy",
        "is_empty",
        "is_foreign",
        "is_gather",
        "is_in_place",
        "is_numbered",
        "is_opaque",
        "is_plain_view",
        "is_query",
        "is_random",
        "is_routing",
        "is_simple",
        "is_view",
        "lists",
        "name",
        "returns_fresh",
        "statistics",
        "tensors",
        "written",
        "written_names",
    )

    def __init__(self, operator: Any):
        """Determine all attributes from the operator's schema, namespace and tags."""
        schema = operator._schema
        name, self.name = schema.name, common_name(str(operator))
        positional = [a for a in schema.arguments if not a.kwarg_only]
        keywords = [a for a in schema.arguments if a.kwarg_only]
        self.tensors = _positions(positional, _is_tensor)
        self.lists = _positions(positional, _is_tensor_list)
        self.written = _positions(positional, _is_written)
        self.written_names = tuple(a.name for a in keywords if _is_written(a))
        self.has_tensor_keywords = any(
            _is_tensor(a) or _is_tensor_list(a) for a in keywords
        )
        self.returns_fresh = any(r.alias_info is None for r in schema.returns)
        self.is_view = is_view_operator(operator)
        self.is_random = is_random_operator(operator)
        self.is_empty = name in _EMPTY
        self.is_constant = name in _CONSTANT
        self.is_opaque = name in _OPAQUE or operator.namespace in _OPAQUE_NAMESPACES
        self.is_copy = name == "aten::_to_copy"
        self.is_foreign = operator.namespace not in _HONEST_NAMESPACES
        self.is_gather = name == "fsdp::all_gather_copy_in"
        is_note = name == "aten::record_stream"  # To the allocator.
        self.is_query = is_note or operator.namespace in _QUERY_NAMESPACES
        self.is_numbered = name not in ("aten::detach", "aten::alias")
        self.is_routing = name in _ROUTING
        self.statistics = _statistics(name)
        is_usual = not (
            self.lists
            or self.written_names
            or self.has_tensor_keywords
            or self.is_empty
            or self.is_constant
            or self.is_opaque
            or self.is_foreign
            or self.statistics
        )
        self.is_plain_view = is_usual and self.is_view and self.tensors == (0,)
        self.is_in_place = is_usual and self.written == (0,) and not self.returns_fresh
        self.is_simple = is_usual and not (
            self.written or self.is_view or self.is_random
        )


def decides(facts: OperatorFacts, read: Iterable[Any], made: Iterable[Any]) -> bool:
    """Return whether an operator computes a choice (integers or booleans) from floats.

    All outputs of an operator that makes a discrete choice are always kept: a recompute
    must not select another expert, element or branch because a kernel rounded
    differently. Random operators may be re-run: a recompute draws the same numbers.
    """
    return (
        not facts.is_random
        and not WHOLE.isdisjoint(made)
        and any(d.is_floating_point or d.is_complex for d in read)
    )


def leaves_device(read: Iterable[Tensor], made: Tensor) -> bool:
    """Return whether an output is a CPU copy of a tensor on another device."""
    return made.device.type == "cpu" and any(t.device.type != "cpu" for t in read)


def _positions(arguments: list[Any], test: Callable[[Any], bool]) -> tuple[int, ...]:
    return tuple(i for i, argument in enumerate(arguments) if test(argument))


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def _is_tensor_list(argument: Any) -> bool:
    return "List[" in str(argument.type) and "Tensor" in str(argument.type)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _statistics(name: str) -> Callable[[tuple[Any, ...]], bool] | None:
    if name not in _STATISTICS:
        return None
    training = _STATISTICS[name]
    if training is None:
        return lambda args: True
    # Variants without statistics have no tensor at that position.
    return lambda args: len(args) > training and args[training] is True


# Keyed by `id`, because the hash of an overload is a slow Python function. The entry
# references the operator, so that its `id` is not reused.
_FACTS: dict[int, tuple[OperatorFacts | None, Any]] = {}


def facts_of(operator: Any) -> OperatorFacts | None:
    """Return an operator's properties for recording; `None` if it is higher-order."""
    known = _FACTS.get(id(operator))
    if known is None:
        is_usual = isinstance(operator, OperatorOverload)
        known = (OperatorFacts(operator) if is_usual else None, operator)
        _FACTS[id(operator)] = known
    return known[0]


def flat_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the leaves of an operator's arguments, in the order of `tree_iter`."""
    for value in chain(args, kwargs.values()):
        if isinstance(value, Tensor | int | float | None):
            yield value  # Most are, and trees are walked slowly.
        else:
            yield from tree_iter(value)


def flat_outputs(output: Any) -> list[Any]:
    """Return an operator's outputs as a flat list, in order.

    Example:
        >>> flat_outputs((1, [2, 3]))
        [1, 2, 3]
    """
    if isinstance(output, tuple | list):
        flat: list[Any] = []
        for item in output:
            flat += flat_outputs(item) if isinstance(item, tuple | list) else [item]
        return flat
    return [output]


def tensors_in_tree(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a tree, such as arguments or a state."""
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments, flattening lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(argument)
