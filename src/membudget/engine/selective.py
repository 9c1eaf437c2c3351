"""Selective checkpointing by contexts, in the form that torch gave it.

A policy is asked for each operator of the forward whether its output is kept. A
recompute takes kept outputs from the record instead of running the operator. The record
goes by the order of the operators, so a recompute that runs other operators is an
error, and any number of recomputes reads the same record.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from membudget._torch import (
    DispatchMode,
    OperatorOverload,
    OperatorPacket,
    detach_with_version,
    is_mutable_operator,
    tree_iter,
    tree_map_only,
)
from membudget.engine.identity import version_of
from membudget.errors import (
    ChangedSinceForwardError,
    OptionError,
    RecomputeMismatchError,
)

Policy = Callable[..., CheckpointPolicy | bool]

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

# Operators of bookkeeping, whose number may differ between the runs.
_IGNORED = frozenset((torch.ops.aten.detach.default,))


class _Kept:
    """The outputs of one operator, with the versions that they had."""

    __slots__ = ("outputs", "versions")

    def __init__(self, outputs: Any):
        self.outputs = tree_map_only(Tensor, detach_with_version, outputs)
        self.versions = [version_of(t) for t in _tensors(self.outputs)]

    def changed(self) -> bool:
        return self.versions != [version_of(t) for t in _tensors(self.outputs)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


class _Forward(DispatchMode):
    """Ask the policy for each operator, and record."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy
        self.record: list[tuple[Any, _Kept | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if func in _IGNORED:
            return outputs
        context = SelectiveCheckpointContext(is_recompute=False, op_output=outputs)
        decision = self.policy(context, func, *args, **kwargs)
        save = decision in _SAVE if isinstance(decision, CheckpointPolicy) else decision
        if is_mutable_operator(func):
            save = False  # Its output is its operand, which must be written again.
        self.record.append((func, _Kept(outputs) if save else None))
        return outputs

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self.record and not any(k for _, k in self.record):
            warnings.warn(
                "the policy of a selective region kept the output of none of its "
                f"{len(self.record)} operators. A policy function sees overloads, such "
                "as torch.ops.aten.mm.default; compare with those, or give a list, in "
                "which torch.ops.aten.mm stands for all of its overloads.",
                stacklevel=2,
            )


class _Recompute(DispatchMode):
    """Hand out what was kept, and run the rest."""

    def __init__(self, forward: _Forward, allow_mutation: bool):
        super().__init__()
        self.forward = forward
        self.allow_mutation = allow_mutation
        self.cursor = 0

    def __enter__(self) -> Any:
        self.cursor = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IGNORED:
            return func(*args, **kwargs)
        kept = self._next(func)
        if kept is None:
            return func(*args, **kwargs)
        if kept.changed() and not self.allow_mutation:
            raise ChangedSinceForwardError(
                f"the output of {func}, kept by the policy of a selective region, has "
                "been mutated since. Leave the operator that follows it out of place, "
                "let the policy recompute it, or pass allow_cache_entry_mutation=True "
                "if the change does not matter to the backward.",
                [str(func)],
            )
        # Fresh aliases, because autograd writes its history into what it is given.
        return tree_map_only(Tensor, Tensor.detach, kept.outputs)

    def _next(self, func: Any) -> _Kept | None:
        record, cursor = self.forward.record, self.cursor
        self.cursor = cursor + 1
        expected = record[cursor][0] if cursor < len(record) else None
        if expected is not func:
            raise RecomputeMismatchError(
                f"operator {cursor} of a selective region's recompute is {func}, where "
                f"the forward ran {expected or 'no more operators'}: the function did "
                "not do the same again.",
                index=cursor,
                operator=str(func),
                saved=str(expected),
                recomputed=str(func),
            )
        return record[cursor][1]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | Sequence[Any],
    allow_cache_entry_mutation: bool = False,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the pair of contexts for `context_fn` that keeps chosen outputs.

    Args:
        policy_fn_or_list: A function `(context, operator, *args, **kwargs)` that
            returns a `CheckpointPolicy` or a bool, asked in the forward only; or a
            list of operators to keep, in which a packet (`torch.ops.aten.mm`) stands
            for all of its overloads.
        allow_cache_entry_mutation: Use a kept output even if it was changed in place.

    Returns:
        The context for the forward and the one for the recompute.

    Raises:
        OptionError: If the policy is neither a function nor a list of operators.

    Warns:
        UserWarning: If the policy keeps nothing in a region.

    Example:
        >>> import functools, membudget as mb, torch
        >>> keep = functools.partial(
        ...     mb.compat.create_selective_checkpoint_contexts, [torch.ops.aten.mm]
        ... )
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> y = mb.checkpoint(lambda x: (x @ x).sin(), x, context_fn=keep)
    """
    policy = _as_policy(policy_fn_or_list)
    forward = _Forward(policy)
    return forward, _Recompute(forward, allow_cache_entry_mutation)


def _as_policy(policy: Policy | Sequence[Any]) -> Policy:
    if isinstance(policy, list | tuple | set | frozenset):
        overloads = frozenset(o for item in policy for o in _overloads(item))
        return lambda context, operator, *args, **kwargs: operator in overloads
    if callable(policy):
        return policy
    raise OptionError(
        "a policy is a function or a list of operators such as torch.ops.aten.mm; got "
        f"{policy!r}"
    )


def _overloads(item: Any) -> list[Any]:
    if isinstance(item, OperatorOverload):
        return [item]
    if isinstance(item, OperatorPacket):
        return [getattr(item, name) for name in item.overloads()]
    raise OptionError(
        "a list policy holds operators such as torch.ops.aten.mm.default, or packets "
        f"such as torch.ops.aten.mm; got {item!r}"
    )
