"""Policies: predicates that decide which outputs a replay region keeps.

A policy is asked once per operator output, after the operator has run. It is not asked
about views, because recomputing them costs nothing. Policies compose with `|`, `&` and
`~`, and pickle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from membudget.errors import OptionError

Output = tuple[int, int]
"""The number of an operator in the region's call, from 1, and which of its outputs."""


@dataclass(frozen=True)
class Stages:
    """The stages of a region's backward pass; each recomputes only what it serves.

    A stage frees its recomputed tensors when it ends, except those that it holds for
    later stages, so fewer are live at once.

    Attributes:
        firsts: The first saved tensor of each stage, by its index among the region's
            saved tensors in forward order.
        held: The outputs that each stage holds for later ones once it has computed
            them.
    """

    firsts: Sequence[int]
    held: Sequence[Collection[Output]]

    def of(self, saved: int) -> int:
        """Return the stage that serves a saved tensor."""
        return max(0, bisect_right(self.firsts, saved) - 1)


class Candidate:
    """An output that may be kept.

    Attributes:
        operator: The overload that produced it, e.g. `torch.ops.aten.mm.default`.
        args: The operator's positional arguments.
        kwargs: Its keyword arguments.
        output: The output.
        index: The number of the operator within the region, from 1.
        output_index: The index of the output; written arguments follow the outputs.
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
        """Describe an output; the module path is computed only on request."""
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.output = output
        self.index = index
        self.output_index = output_index
        self._module_path = module_path

    @property
    def module_path(self) -> str:
        """The innermost running module, by its name in the region; `""` if none."""
        return self._module_path()


class Policy:
    """A predicate on outputs.

    Attributes:
        expects_to_keep: Whether to warn if a region keeps nothing.
        stages: The stages of the backward pass; `None` for a single one.
    """

    expects_to_keep = False
    stages: Stages | None = None

    def keeps(self, candidate: Candidate) -> bool:
        """Tell whether to keep an output."""
        raise NotImplementedError

    def by_operator(self, operator: Any) -> bool | None:
        """Decide by the operator alone; `None` if that is not enough."""
        return None

    def begin(self) -> Policy:
        """Return the policy for one call of a region, at its start."""
        return self

    def end(self) -> None:
        """React to the end of the call."""

    def keeps_name(self, name: str) -> bool:
        """Tell whether to keep a tensor with this name from `membudget.name`."""
        return False

    def __or__(self, other: Policy) -> Policy:
        """Keep what either keeps."""
        return _Pair(self, as_policy(other), True)

    def __and__(self, other: Policy) -> Policy:
        """Keep what both keep."""
        return _Pair(self, as_policy(other), False)

    def __invert__(self) -> Policy:
        """Keep what this one does not."""
        return _Not(self)


@dataclass(frozen=True)
class _Always(Policy):
    """The same decision for every output."""

    answer: bool

    def keeps(self, candidate: Candidate) -> bool:
        return self.answer

    def by_operator(self, operator: Any) -> bool | None:
        return self.answer

    def keeps_name(self, name: str) -> bool:
        return self.answer


@dataclass(frozen=True)
class _Operators(Policy):
    """Outputs of operators, by names without namespace and overload."""

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
    """Everything that runs inside submodules, so that they do not run again."""

    patterns: tuple[str, ...]

    def keeps(self, candidate: Candidate) -> bool:
        path = candidate.module_path
        while path:
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
    """Two policies, of which the first to answer `decisive` decides."""

    first: Policy
    second: Policy
    decisive: bool  # `True` for "or", `False` for "and".

    def keeps(self, candidate: Candidate) -> bool:
        first = self.first.keeps(candidate)
        return first if bool(first) is self.decisive else self.second.keeps(candidate)

    def by_operator(self, operator: Any) -> bool | None:
        answers = [p.by_operator(operator) for p in (self.first, self.second)]
        if self.decisive in answers:
            return self.decisive
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
    """Tell whether a policy depends on names from `membudget.name`."""
    parts = [part for part in vars(policy).values() if isinstance(part, Policy)]
    return isinstance(policy, _Named) or any(map(reads_names, parts))


def operators(*names: str) -> Policy:
    """Keep the outputs of operators, named as in `torch.ops.aten`: `"mm"`, `"exp"`."""
    return _Operators(frozenset(names))


def named(*names: str) -> Policy:
    """Keep the tensors that `membudget.name` gave one of these names."""
    return _Named(frozenset(names))


def inside(*patterns: str) -> Policy:
    """Keep everything that submodules compute, so that a backward does not rerun them.

    Args:
        *patterns: Glob patterns for the module's name in the region: `"*.attn"`,
            `"fc2"`.
    """
    return _Inside(patterns)


nothing: Policy = _Always(False)

everything: Policy = _Always(True)


def as_policy(keep: Any) -> Policy:
    """Return the policy that `keep=` describes: a policy, globs, or a predicate.

    Raises:
        OptionError: It is none of these.
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
