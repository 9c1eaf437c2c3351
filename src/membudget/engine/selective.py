"""Selective checkpointing by contexts, in the form that torch gave it.

torch hands a region two contexts, one for the forward and one for the recompute. Those
made here are torch's own, and carry our policy. A region of ours takes the policy and
runs under the replay engine: the function never runs twice, so nothing can come out of
step. Wherever torch's checkpoint takes the contexts, as it does inside of
`torch.compile`, they do there what torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as torch_checkpointing
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from membudget._torch import (
    OperatorOverload,
    OperatorPacket,
    is_view_operator,
    tree_iter,
)
from membudget.engine.options import ContextPair
from membudget.engine.policy import Candidate, Policy
from membudget.errors import OptionError, OptionTypeError

PolicyFunction = Callable[..., CheckpointPolicy | bool]

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class TorchPolicy:
    """A policy of ours as the function that torch's contexts ask.

    Attributes:
        policy: What a region of ours keeps.
    """

    def __init__(self, policy: Policy, module_names: Mapping[str, str] | None = None):
        """Begin one call of a region.

        Args:
            policy: What is kept.
            module_names: The name in the region of each module, by its `id` as text.
        """
        self.policy = policy
        self._call = policy.begin()
        self._module_names = module_names or {}
        self._number = 0

    def __call__(
        self,
        context: SelectiveCheckpointContext,
        operator: Any,
        *args: Any,
        **kwargs: Any,
    ) -> CheckpointPolicy | bool:
        """Decide on one operator."""
        self._number += 1
        if not isinstance(operator, OperatorOverload):
            return True  # A higher-order operator: replay cannot run it again, either.
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
        """Return the innermost module of the operator that is being traced.

        Dynamo notes with each operator the modules that ran, by their ids, to which it
        adds "@1" in a second call.
        """
        stack = fx_traceback.get_current_meta().get("nn_module_stack") or {}
        for key in reversed(stack):
            name = self._module_names.get(str(key).partition("@")[0])
            if name is not None:
                return name
        if self._module_names or not stack:
            return ""
        # A lambda, of which Dynamo shows no object: the path from the compiled code.
        return str([*stack.values()][-1][0]).replace("L['self'].", "")


class _FunctionPolicy(TorchPolicy):
    """The function that the user gave in torch's form."""

    def __init__(self, policy: _Function):
        super().__init__(policy)
        self._function = policy.function

    def __call__(self, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        return self._function(*args, **kwargs)


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
) -> ContextPair:
    """Return the pair of contexts for `context_fn` that keeps chosen outputs.

    Args:
        policy_fn_or_list: A function `(context, operator, *args, **kwargs)` that
            returns a `CheckpointPolicy` or a bool, asked once for each output in the
            forward; or a list of operators to keep, in which a packet
            (`torch.ops.aten.mm`) stands for all of its overloads. In a region of ours,
            views are never asked about.
        allow_cache_entry_mutation: Without effect in a region of ours, where what is
            changed in place after it was kept is right.

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
    asked = (
        _FunctionPolicy(policy)
        if isinstance(policy, _Function)
        else TorchPolicy(policy)
    )
    return contexts_of(asked, allow_cache_entry_mutation)


def contexts_of(policy: TorchPolicy, allow_mutation: bool = False) -> ContextPair:
    """Return torch's contexts, which ask `policy` for each operator."""
    pair: ContextPair = torch_checkpointing.create_selective_checkpoint_contexts(
        policy, allow_mutation
    )
    return pair


def policy_of(contexts: ContextPair) -> Policy | None:
    """Return the policy that contexts carry; `None` if they are not ours."""
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
