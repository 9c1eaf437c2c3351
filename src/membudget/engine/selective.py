"""Selective checkpointing by contexts, in the form that torch gave it.

torch hands a region two contexts, one for the forward and one for the recompute. Here
the first carries a policy, and the region that gets it runs under the replay engine:
there is no second run of the function, so nothing can come out of step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from membudget._torch import DispatchMode, OperatorOverload, OperatorPacket
from membudget.engine.policy import Candidate, Policy
from membudget.errors import OptionError

PolicyFunction = Callable[..., CheckpointPolicy | bool]

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class SelectiveContext(DispatchMode):
    """A context that tells a region what to keep, and does nothing else.

    It is a dispatch mode because compiled code, where torch's own checkpoint takes
    over, asks for one.

    Attributes:
        policy: What the region keeps.
    """

    def __init__(self, policy: Policy):
        """Carry a policy."""
        super().__init__()
        self.policy = policy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let the operator run."""
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Overloads(Policy):
    """The outputs of listed operators."""

    overloads: frozenset[Any]
    expects_to_keep = True

    def keeps(self, candidate: Candidate) -> bool:
        return candidate.operator in self.overloads

    def by_operator(self, operator: Any) -> bool:
        return operator in self.overloads


@dataclass(frozen=True)
class _Function(Policy):
    """What a function of torch's form decides to save."""

    function: PolicyFunction
    expects_to_keep = True

    def keeps(self, candidate: Candidate) -> bool:
        context = SelectiveCheckpointContext(
            is_recompute=False, op_output=candidate.output
        )
        decision = self.function(
            context, candidate.operator, *candidate.args, **candidate.kwargs
        )
        if isinstance(decision, CheckpointPolicy):
            return decision in _SAVE
        return bool(decision)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: PolicyFunction | Sequence[Any],
    allow_cache_entry_mutation: bool = False,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the pair of contexts for `context_fn` that keeps chosen outputs.

    Args:
        policy_fn_or_list: A function `(context, operator, *args, **kwargs)` that
            returns a `CheckpointPolicy` or a bool, asked once for each output in the
            forward; or a list of operators to keep, in which a packet
            (`torch.ops.aten.mm`) stands for all of its overloads. Views are never
            asked about.
        allow_cache_entry_mutation: Without effect: what is changed in place after it
            was kept is right.

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
    return SelectiveContext(policy), SelectiveContext(policy)


def _as_policy(policy: PolicyFunction | Sequence[Any]) -> Policy:
    if isinstance(policy, list | tuple | set | frozenset):
        return _Overloads(frozenset(o for item in policy for o in _overloads(item)))
    if callable(policy):
        return _Function(policy)
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
