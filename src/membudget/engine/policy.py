"""Policies: which outputs a replay region keeps, and where.

A policy is asked once per operator output, after the operator has run. Policies are not
asked about views, because recomputing a view costs nothing. Policies can be pickled,
and combined with `|`, `&` and `~`.

There are three answers: keep it on the device, offload it (`elsewhere`), or recompute
it. Of two policies, `|` takes the answer that comes first in this order, `&` the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from membudget.engine.alignment import Alignment
from membudget.engine.candidate import Answer, Candidate, as_answer
from membudget.engine.policy_key import policy_key
from membudget.engine.stages import Stages
from membudget.errors import OptionError


class Policy:
    """Decides which operator outputs are kept, and where.

    Attributes:
        expects_to_keep: Whether to warn if the policy keeps nothing in a region.
        stages: The stages of the region's backward pass; `None` for a single stage.
        alignment: Numbers the operators of one call like those of a recorded call;
            `None` if they are counted.
        reads_arguments: Whether `keeps` may look at an operator's arguments.
        numbers: Numbers of the operators, as keys, whose outputs the policy may keep;
            `None` if it may keep those of any.
    """

    expects_to_keep = False
    stages: Stages | None = None
    alignment: Alignment | None = None
    reads_arguments = True
    numbers: Mapping[int, Any] | None = None

    def keeps(self, candidate: Candidate) -> Answer:
        """Return whether to keep an operator output, and where."""
        raise NotImplementedError

    def by_operator(self, operator: Any) -> Answer | None:
        """Return the answer for an operator's outputs; `None` if it varies by call."""
        return None

    def begin(self) -> Policy:
        """Prepare for a new call to a region; return the policy to use in that call."""
        return self

    def warn_if_idle(self, operators: int, kept: int) -> None:
        """Warn if a selective policy kept none of the outputs of a call."""
        if self.expects_to_keep and operators and not kept:
            warnings.warn(
                f"the policy of a selective region kept none of its {operators} "
                "operators' outputs. A policy function sees overloads such as "
                "torch.ops.aten.mm.default: compare with those, or pass a list, in "
                "which torch.ops.aten.mm stands for all of its overloads.",
                stacklevel=5,
            )

    def end(self, operators: int) -> None:
        """React to the end of a call, which ran so many operators; here, do nothing."""

    @property
    def differs(self) -> bool:
        """Whether the call has run operators that the policy does not expect."""
        return False

    def followed(self, operators: int, differs: bool) -> None:
        """Note that operators of a call were as in an earlier one, unasked.

        Args:
            operators: The last of them, by its number for the policy.
            differs: Whether the earlier call has run what the policy does not expect.
        """

    def keeps_name(self, name: str) -> Answer:
        """Return the answer for tensors to which `membudget.name` gave this name."""
        return False

    @cached_property
    def kinds(self) -> frozenset[type[Policy]]:
        """The class of this policy, and those of the policies that it combines."""
        parts = [part for part in vars(self).values() if isinstance(part, Policy)]
        return frozenset({type(self)}.union(*(part.kinds for part in parts)))

    @property
    def key(self) -> Hashable:
        """What two policies share that keep the same outputs, wherever they are."""
        return self

    def __or__(self, other: Policy) -> Policy:
        """Combine two policies: keep the outputs that either of them keeps.

        An output that one of them keeps on the device stays there.
        """
        return _Pair(self, as_policy(other), True)

    def __and__(self, other: Policy) -> Policy:
        """Combine two policies: keep the outputs that both of them keep.

        An output that one of them offloads is offloaded.
        """
        return _Pair(self, as_policy(other), False)

    def __invert__(self) -> Policy:
        """Invert the policy: keep on the device the outputs that it does not keep."""
        return _Not(self)


@dataclass(frozen=True)
class _Always(Policy):
    """A policy that makes the same decision for every output."""

    answer: bool

    def keeps(self, candidate: Candidate) -> bool:
        return self.answer

    def by_operator(self, operator: Any) -> bool | None:
        return self.answer

    def keeps_name(self, name: str) -> bool:
        return self.answer


@dataclass(frozen=True)
class _Operators(Policy):
    """Keeps outputs of the named operators; names omit namespace and overload."""

    names: frozenset[str]

    def keeps(self, candidate: Candidate) -> bool:
        return self.by_operator(candidate.operator)

    def by_operator(self, operator: Any) -> bool:
        return operator._schema.name.partition("::")[2] in self.names


@dataclass(frozen=True)
class _Named(Policy):
    names: frozenset[str]

    def keeps(self, candidate: Candidate) -> bool:
        return False

    def by_operator(self, operator: Any) -> bool | None:
        return False

    def keeps_name(self, name: str) -> bool:
        return name in self.names


@dataclass(frozen=True)
class _Inside(Policy):
    """Keeps all outputs computed inside submodules whose path matches a pattern."""

    patterns: tuple[str, ...]

    def keeps(self, candidate: Candidate) -> bool:
        path = candidate.module_path
        while path:  # A pattern for a module covers its submodules.
            if any(fnmatchcase(path, pattern) for pattern in self.patterns):
                return True
            path = path.rpartition(".")[0]
        return False


@dataclass(frozen=True)
class Predicate(Policy):
    """Keeps the outputs that a function of the user's selects."""

    function: Callable[..., Any]

    @property
    def key(self) -> Hashable:
        """What functions share that are made anew in each call."""
        return type(self), policy_key(self.function)

    def keeps(self, candidate: Candidate) -> Answer:
        """Return the function's answer."""
        return as_answer(self.function(candidate))


@dataclass(frozen=True)
class _Pair(Policy):
    """Two policies combined by "or" or "and", with short-circuit evaluation."""

    first: Policy
    second: Policy
    decisive: bool  # `True` for "or", `False` for "and".

    @property
    def key(self) -> Hashable:
        return self.decisive, self.first.key, self.second.key

    def keeps(self, candidate: Candidate) -> Answer:
        first = self.first.keeps(candidate)
        if first is self.decisive:
            return first
        return self._combined(first, self.second.keeps(candidate))

    def by_operator(self, operator: Any) -> Answer | None:
        first = self.first.by_operator(operator)
        second = self.second.by_operator(operator)
        if self.decisive in (first, second):
            return self.decisive  # Even if the other answer is `None`.
        if first is None or second is None:
            return None
        return self._combined(first, second)

    def keeps_name(self, name: str) -> Answer:
        return self._combined(self.first.keeps_name(name), self.second.keeps_name(name))

    def _combined(self, first: Answer, second: Answer) -> Answer:
        if second is self.decisive:
            return second
        return second if first is (not self.decisive) else first


@dataclass(frozen=True)
class _Not(Policy):
    policy: Policy

    @property
    def key(self) -> Hashable:
        return None, self.policy.key

    def keeps(self, candidate: Candidate) -> bool:
        return not self.policy.keeps(candidate)

    def by_operator(self, operator: Any) -> bool | None:
        answer = self.policy.by_operator(operator)
        return None if answer is None else not answer

    def keeps_name(self, name: str) -> bool:
        return not self.policy.keeps_name(name)


def reads_names(policy: Policy) -> bool:
    """Return whether a policy depends on names given by `membudget.name`."""
    return _Named in policy.kinds


def operators(*names: str) -> Policy:
    """Keep outputs of the named operators, e.g. `"mm"` for `torch.ops.aten.mm`."""
    return _Operators(frozenset(names))


def named(*names: str) -> Policy:
    """Keep the tensors that `membudget.name` gave one of these names."""
    return _Named(frozenset(names))


def inside(*patterns: str) -> Policy:
    """Keep all outputs computed in submodules whose name matches a pattern.

    Args:
        *patterns: Glob patterns for module names in the region: `"*.attn"`, `"fc2"`.
    """
    return _Inside(patterns)


nothing: Policy = _Always(False)

everything: Policy = _Always(True)


def as_policy(keep: Any) -> Policy:
    """Convert the option `keep` (a policy, globs, a predicate or `None`) to a policy.

    Raises:
        OptionError: `keep` cannot be converted to a policy.
    """
    if keep is None:
        return nothing
    if isinstance(keep, Policy):
        return keep
    if isinstance(keep, str):
        return inside(keep)
    if callable(keep):
        return Predicate(keep)
    if isinstance(keep, Iterable):
        patterns = tuple(keep)
        if patterns and all(isinstance(pattern, str) for pattern in patterns):
            return inside(*patterns)
    raise OptionError(
        "keep must be a policy (membudget.policies.matmuls), a list of globs on names "
        f"of submodules (['*.attn']), or a function of a candidate; got {keep!r}"
    )
