"""Policies: predicates that decide which outputs a replay region keeps.

A policy is called once per operator output, after the operator has run. Policies are
not called for views, because recomputing a view costs nothing. Policies can be pickled,
and combined with `|`, `&` and `~`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from membudget.engine.alignment import Alignment
from membudget.engine.stages import Stages
from membudget.errors import OptionError


class Candidate:
    """An operator output that a policy may keep.

    Attributes:
        operator: The overload that was called, e.g. `torch.ops.aten.mm.default`.
        args: Positional arguments of the operator.
        kwargs: Keyword arguments of the operator.
        output: The output tensor.
        index: The operator's number within the region, counted from 1; the number of
            its counterpart, if the policy's operators are those of a recorded call.
        output_index: Index among the operator's outputs and written arguments.
    """

    __slots__ = (
        *("_module_path", "args", "index", "kwargs", "operator", "output"),
        "output_index",
    )

    def __init__(
        self,
        operator: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: Tensor,
        index: int,
        output_index: int,
        module_path: Callable[[], str],
    ):
        """Describe an operator output; the module path is computed only on request."""
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.output = output
        self.index = index
        self.output_index = output_index
        self._module_path = module_path

    @property
    def module_path(self) -> str:
        """Name of the innermost running module in the region; `""` without one."""
        return self._module_path()


class Policy:
    """A predicate that selects operator outputs to keep.

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

    def keeps(self, candidate: Candidate) -> bool:
        """Return whether to keep an operator output."""
        raise NotImplementedError

    def by_operator(self, operator: Any) -> bool | None:
        """Return whether to keep an operator's outputs; `None` if it varies by call."""
        return None

    def begin(self) -> Policy:
        """Prepare for a new call to a region; return the policy to use in that call."""
        return self

    def end(self, operators: int) -> None:
        """React to the end of a call, which ran so many operators; here, do nothing."""

    def keeps_name(self, name: str) -> bool:
        """Return whether to keep tensors to which `membudget.name` gave this name."""
        return False

    def __or__(self, other: Policy) -> Policy:
        """Combine two policies: keep the outputs that either of them keeps."""
        return _Pair(self, as_policy(other), True)

    def __and__(self, other: Policy) -> Policy:
        """Combine two policies: keep the outputs that both of them keep."""
        return _Pair(self, as_policy(other), False)

    def __invert__(self) -> Policy:
        """Invert the policy: keep the outputs that it does not keep."""
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
class _Predicate(Policy):
    function: Callable[[Candidate], bool]

    def keeps(self, candidate: Candidate) -> bool:
        return bool(self.function(candidate))


@dataclass(frozen=True)
class _Pair(Policy):
    """Two policies combined by "or" or "and", with short-circuit evaluation."""

    first: Policy
    second: Policy
    decisive: bool  # `True` for "or", `False` for "and".

    def keeps(self, candidate: Candidate) -> bool:
        first = self.first.keeps(candidate)
        return first if bool(first) is self.decisive else self.second.keeps(candidate)

    def by_operator(self, operator: Any) -> bool | None:
        answers = [p.by_operator(operator) for p in (self.first, self.second)]
        if self.decisive in answers:
            return self.decisive  # Even if the other answer is `None`.
        return None if None in answers else not self.decisive

    def keeps_name(self, name: str) -> bool:
        first = self.first.keeps_name(name)
        return first if bool(first) is self.decisive else self.second.keeps_name(name)


@dataclass(frozen=True)
class _Not(Policy):
    policy: Policy

    def keeps(self, candidate: Candidate) -> bool:
        return not self.policy.keeps(candidate)

    def by_operator(self, operator: Any) -> bool | None:
        answer = self.policy.by_operator(operator)
        return None if answer is None else not answer

    def keeps_name(self, name: str) -> bool:
        return not self.policy.keeps_name(name)


def reads_names(policy: Policy) -> bool:
    """Return whether a policy depends on names given by `membudget.name`."""
    parts = [part for part in vars(policy).values() if isinstance(part, Policy)]
    return isinstance(policy, _Named) or any(map(reads_names, parts))


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
        return _Predicate(keep)
    if isinstance(keep, Iterable):
        patterns = tuple(keep)
        if patterns and all(isinstance(pattern, str) for pattern in patterns):
            return inside(*patterns)
    raise OptionError(
        "keep must be a policy (membudget.policies.matmuls), a list of globs on names "
        f"of submodules (['*.attn']), or a function of a candidate; got {keep!r}"
    )
