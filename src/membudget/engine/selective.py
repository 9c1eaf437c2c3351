"""Selective checkpointing by contexts, in torch's form.

torch gives a region two contexts, one for the forward and one for the recompute. The
contexts made here are torch's own and carry our policy. A region of ours takes the
policy and runs under the replay engine: the function never runs twice, so forward and
recompute cannot get out of step. Where torch's checkpoint gets the contexts, as inside
`torch.compile`, they behave like torch's.
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
    """One of our policies, as the function that torch's contexts call.

    Attributes:
        policy: What a region of ours keeps.
    """

    def __init__(self, policy: Policy, module_names: Mapping[str, str] | None = None):
        """Start one call of a region.

        Args:
            policy: Decides what to keep.
            module_names: Each module's name in the region, by its `id` as text.
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
            # A higher-order operator, which replay cannot run again either.
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
        """Return the innermost module of the operator that is being traced.

        Dynamo attaches to each operator the modules that ran, by `id`, with "@1"
        appended in a second call.
        """
        stack = fx_traceback.get_current_meta().get("nn_module_stack") or {}
        for key in reversed(stack):
            name = self._module_names.get(str(key).partition("@")[0])
            if name is not None:
                return name
        if self._module_names or not stack:
            return ""
        # For a lambda, Dynamo gives no object: use the path from the compiled code.
        return str([*stack.values()][-1][0]).replace("L['self'].", "")


class _FunctionPolicy(TorchPolicy):
    """A policy function that the user gave in torch's form."""

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
    """What a policy function in torch's form decides to save."""

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
            returns a `CheckpointPolicy` or a bool, called once per output in the
            forward; or a list of operators to keep, in which a packet
            (`torch.ops.aten.mm`) stands for all of its overloads. In a region of ours,
            it is not called for views.
        allow_cache_entry_mutation: No effect in a region of ours, where writing a kept
            tensor in place is always safe.

    Returns:
        The context for the forward and the one for the recompute.

    Raises:
        OptionError: The policy is neither a function nor a list of operators.

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
    """Return torch's contexts, which call `policy` for each operator."""
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
