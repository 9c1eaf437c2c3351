"""Support torch's selective checkpointing contexts, and regions in compiled code.

In selective checkpointing, torch uses two contexts, one for the forward and one for the
recompute, to decide which outputs are kept. This module creates torch's own contexts
around a membudget policy. In eager code, a region extracts the policy from these
contexts and runs under the replay engine: the function runs only once, so forward and
recompute cannot diverge.

Inside `torch.compile`, a region runs as `torch.utils.checkpoint.checkpoint`. Dynamo
traces the region into a graph, whose tagged operators the partitioner recomputes.
Compiled code has no Python state to restore: random numbers and buffers are inputs and
outputs of the graph. In compiled code, only the options `keep` and `context_fn` apply,
and torch gets `keep` as a `context_fn`. Dynamo needs a constant `context_fn`, so
`_number_of`, which runs untraced, represents each policy by a number.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor
from torch.fx import traceback as fx_traceback
from torch.nn import Module
from torch.utils import checkpoint as torch_checkpointing
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    noop_context_fn,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from membudget._torch import (
    OperatorOverload,
    OperatorPacket,
    constant_to_dynamo,
    is_view_operator,
    tree_iter,
)
from membudget.engine.candidate import Answer, Candidate
from membudget.engine.messages import module_names
from membudget.engine.options import OPTION_NAMES, ContextPair
from membudget.engine.policy import Policy, Predicate, as_policy, reads_names
from membudget.errors import OptionError, OptionTypeError
from membudget.offload import shared_offload

PolicyFunction = Callable[..., CheckpointPolicy | bool]

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


class TorchPolicy:
    """Adapts a membudget policy to the function that torch's contexts call."""

    def __init__(self, policy: Policy, names: Mapping[str, str] | None = None):
        """Adapt `policy` to one region call; `names` maps ids of modules to names."""
        self.policy = policy
        self._call = policy.begin()
        self._module_names = names or {}
        self._number = 0

    def __call__(
        self,
        context: SelectiveCheckpointContext,
        operator: Any,
        *args: Any,
        **kwargs: Any,
    ) -> CheckpointPolicy | bool:
        """Return whether to keep the outputs of one operator."""
        self._number += 1
        if not isinstance(operator, OperatorOverload):
            # A higher-order operator; the replay engine cannot recompute these either.
            return True
        if is_view_operator(operator):
            return False
        return any(
            self._call.keeps(
                Candidate(
                    operator, args, kwargs, output, self._number, index, self._path
                )
            )
            for index, output in enumerate(tree_iter(context.op_output))
            if isinstance(output, Tensor)
        )

    def _path(self) -> str:
        """Return the name of the innermost module around the operator being traced.

        Dynamo attaches the stack of running modules to each operator, keyed by module
        `id`, with "@1" appended in a module's second call.
        """
        stack = fx_traceback.get_current_meta().get("nn_module_stack") or {}
        for key in reversed(stack):
            name = self._module_names.get(str(key).partition("@")[0])
            if name is not None:
                return name
        if self._module_names or not stack:
            return ""
        # For a lambda, the owner is unknown: use the path in the compiled code.
        return str([*stack.values()][-1][0]).replace("L['self'].", "")


class _FunctionPolicy(TorchPolicy):
    """Passes torch's calls on to a policy function that has torch's signature."""

    def __init__(self, policy: _Function):
        super().__init__(policy)
        self._function = policy.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class _Overloads(Policy):
    """Keeps the outputs of the listed operator overloads."""

    overloads: frozenset[Any]
    expects_to_keep = True

    def keeps(self, candidate: Candidate) -> bool:
        return candidate.operator in self.overloads

    def by_operator(self, operator: Any) -> bool:
        return operator in self.overloads


@dataclass(frozen=True)
class _Function(Predicate):
    """Keeps the outputs that a policy function with torch's signature selects."""

    expects_to_keep = True

    def keeps(self, candidate: Candidate) -> Answer:
        context = SelectiveCheckpointContext(
            is_recompute=False, op_output=candidate.output
        )
        decision = self.function(
            context, candidate.operator, *candidate.args, **candidate.kwargs
        )
        if decision in _OFFLOAD:
            return shared_offload()
        if isinstance(decision, CheckpointPolicy):
            return decision in _SAVE
        return bool(decision)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: PolicyFunction | Sequence[Any],
    allow_cache_entry_mutation: bool = False,
) -> ContextPair:
    """Create a pair of contexts for `context_fn` that keeps selected outputs.

    Args:
        policy_fn_or_list: A function `(context, operator, *args, **kwargs)` that
            returns a `CheckpointPolicy` or a bool, called once per output in the
            forward; or a list of operators to keep, in which a packet
            (`torch.ops.aten.mm`) stands for all of its overloads. In membudget regions,
            the function is not called for views, and may offload.
        allow_cache_entry_mutation: Has no effect in membudget regions, where writing a
            kept tensor in place is always safe.

    Returns:
        The context for the forward and the context for the recompute.

    Raises:
        OptionError: The policy is neither a function nor a list of operators.

    Warns:
        UserWarning: The policy kept nothing in a region.

    Example:
        >>> import functools, membudget as mb, torch
        >>> keep = functools.partial(
        ...     mb.compat.create_selective_checkpoint_contexts, [torch.ops.aten.mm]
        ... )
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> y = mb.checkpoint(lambda x: (x @ x).sin(), x, context_fn=keep)
    """
    policy = _as_policy(policy_fn_or_list)
    if isinstance(policy, _Function):
        return _contexts_of(_FunctionPolicy(policy), allow_cache_entry_mutation)
    return _contexts_of(TorchPolicy(policy), allow_cache_entry_mutation)


def _contexts_of(policy: TorchPolicy, allow_mutation: bool = False) -> ContextPair:
    pair: ContextPair = torch_checkpointing.create_selective_checkpoint_contexts(
        policy, allow_mutation
    )
    return pair


def policy_of(contexts: ContextPair) -> Policy | None:
    """Return the membudget policy of a pair of contexts; `None` if there is none."""
    asked = getattr(contexts[0], "policy_fn", None)
    return asked.policy if isinstance(asked, TorchPolicy) else None


def _as_policy(policy: PolicyFunction | Sequence[Any]) -> Policy:
    if isinstance(policy, list | tuple | set | frozenset):
        return _Overloads(frozenset(o for item in policy for o in _overloads(item)))
    if callable(policy):
        return _Function(policy)
    raise OptionTypeError(
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


# In compiled code.


def checkpoint_in_compiled_code(
    function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a region with options in `kwargs`; without a function, return a decorator."""
    keep, context_fn = kwargs.get("keep"), kwargs.get("context_fn")
    kwargs = {k: v for k, v in kwargs.items() if k not in OPTION_NAMES}
    if function is not None:
        return run_compiled(function, args, kwargs, keep, context_fn)

    def decorated(wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def region(*args: Any, **kwargs: Any) -> Any:
            return run_compiled(wrapped, args, kwargs, keep, context_fn)

        return region

    return decorated


def run_compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: Any,
    context_fn: Callable[[], ContextPair] | None,
    label: str = "",
) -> Any:
    """Run the region named `label` through torch's own checkpoint function."""
    if keep is not None:
        owner = function.__self__ if isinstance(function, MethodType) else function
        if not isinstance(owner, Module):
            owner = None
        context_fn = functools.partial(_contexts, _number_of(keep, owner, label))
    if context_fn is None or context_fn is noop_context_fn:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=context_fn, **kwargs
    )


# By number, so never removed: a policy, and the names of the region's modules.
_KEPT: list[tuple[Policy, dict[str, str]]] = []


@constant_to_dynamo
def _number_of(keep: Any, owner: Module | None, label: str) -> int:
    try:
        hash(keep)
    # Dynamo traces the object's construction and has not run it.
    except AttributeError:
        raise OptionError(
            "a policy was made inside a function that torch.compile traces: make it "
            "outside, as a global or an attribute, and name it inside"
        ) from None
    except TypeError:  # A list of globs.
        pass
    policy = as_policy(keep)
    if reads_names(policy):
        warnings.warn(
            "membudget.name does nothing inside torch.compile, so no tensor is kept by "
            "its name there: keep by operator or by submodule",
            stacklevel=2,
        )
    names = {} if owner is None else module_names(owner, label)
    kept = policy, {str(key): name for key, name in names.items()}
    if kept not in _KEPT:  # As it is where dynamo traces the code once more.
        _KEPT.append(kept)
    return _KEPT.index(kept)


def _contexts(number: int) -> ContextPair:
    """Create contexts for the policy stored under a number; called once per trace."""
    return _contexts_of(TorchPolicy(*_KEPT[number]))
