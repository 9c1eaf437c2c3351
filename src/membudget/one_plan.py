"""Fit a step that the ranks of a process group run together: one plan for all of them.

    each rank:  record its step ─┐
    all:                         ├─> one graph: the most bytes, the slowest seconds
    rank 0:                      └──> plan ──> all: apply, verify, measure ─┐
                      ^                                                     │
                      └───── lower the target by the largest excess <───────┤
                                                                            v
                                                              a `Fitted` on each rank

All ranks run as many steps, whatever they measure: where one is over the budget or has
other bits, all try the next plan, or raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import takewhile
from operator import attrgetter

from torch.nn import Module

from membudget._torch_accelerator import is_on_accelerator
from membudget.allowance import Budget, absent_bytes
from membudget.apply import Applied, apply
from membudget.attempt import Attempt, planned_run
from membudget.deadline import Deadline
from membudget.errors import OptionError, RecomputeMismatchError
from membudget.fitted import Fitted
from membudget.outcome import REPEATS, Metered, different, plain_run
from membudget.planned import without_plan
from membudget.planner.plan import Plan
from membudget.planner.schedule import Schedule
from membudget.planning import (
    make_plan,
    next_schedules,
    unseen_bytes,
    without_calls,
    without_regions,
)
from membudget.profile import Device, Profile, profile_step
from membudget.profile.optimizer_step import OptimizerLike
from membudget.profile.reduced import places_of, reduced
from membudget.progress import stage
from membudget.ranks import Ranks
from membudget.recorded import budget_on_device
from membudget.rehearsal import Rehearsal
from membudget.report.rank_text import RankBytes
from membudget.sharding import around_units
from membudget.step import Step

QUIETER_RUNS = 3
"""How often ranks repeat a step that was over the budget, on the CPU."""


def fit_on_ranks(
    step: Step,
    ranks: Ranks,
    asked: int | str,
    mode: str,
    optimizer: OptimizerLike,
    device: str | Device | None,
    deadline: Deadline,
) -> Fitted:
    """Fit the step of this rank, while all others do the same; see `fit`.

    Raises:
        BudgetError: If no plan fits on all ranks.
        OptionError: If the ranks run different operators.
        RankError: If another rank failed, with its reason.
        RecomputeMismatchError: If a step under the plan has other bits on any rank.
    """
    with ranks.together("recording the step"):
        own = profile_step(step, optimizer, False, device)
    profile = _of_all(own, step.model, ranks)
    (absent,) = ranks.most([absent_bytes(own.graph.static, optimizer, step.device)])
    budget = Budget.of(asked, profile, absent)
    step.optimizer = Rehearsal.of(profile.graph, budget.absent_bytes)
    with ranks.together("measuring the plain step"):
        own_plain = _quieter_run(step)
    (plain_bytes,) = ranks.most([own_plain.peak_bytes])
    plain = replace(own_plain, peak_bytes=plain_bytes)
    budget = _least(budget_on_device(step, profile, plain, budget), ranks)
    fitting = _OnRanks(step, ranks, profile, plain, budget, mode, deadline)
    applied, own_bytes = fitting.run()
    of_rank = RankBytes(
        own.graph.static.total, own_plain.peak_bytes, own_bytes, own.graph.seconds
    )
    return Fitted(
        mode,
        step,
        profile,
        fitting.attempts,
        applied,
        skipped=deadline.skipped,
        ranks=ranks.of_all(of_rank),
    )


def _quieter_run(step: Step) -> Metered:
    """Return the run of the plain step that took less, of two on the CPU.

    There, gloo's threads hold what they have sent until they are scheduled again. What
    one run took beside the recorded bytes, another does not take.
    """
    first = plain_run(step)
    if is_on_accelerator(step.device):
        return first
    return min(first, plain_run(step), key=attrgetter("peak_bytes"))


def _of_all(own: Profile, model: Module, ranks: Ranks) -> Profile:
    """Return the profile of all ranks, given that of one, for regions inside of units.

    Raises:
        OptionError: If they differ in more than numbers.
    """
    places = places_of(own.graph)
    if len(set(ranks.of_all(sha256(repr(places).encode()).hexdigest()))) > 1:
        raise OptionError(_difference(ranks.of_all(places)))
    graph = reduced(own.graph, ranks.most, ranks.slowest)
    of_all = without_regions(replace(own, graph=graph), own.chance)
    return without_calls(of_all, set(around_units(model)))


def _least(budget: Budget, ranks: Ranks) -> Budget:
    """Return the budget of the rank that has the least left for the step."""
    least, before = ranks.most([-budget.step_bytes, budget.before_bytes])
    return replace(budget, step_bytes=-least, before_bytes=before)


@dataclass
class _OnRanks:
    """Plans that all ranks try, the last of which fits on each of them.

    Attributes:
        plain: The plain step of this rank, with the largest peak of all.
        budget: What the steps of all ranks may allocate.
        attempts: Every plan, with the largest peak of all ranks.
    """

    step: Step
    ranks: Ranks
    profile: Profile
    plain: Metered
    budget: Budget
    mode: str
    deadline: Deadline
    attempts: list[Attempt] = field(default_factory=list)

    def run(self) -> tuple[Applied, int]:
        """Try plans until one fits; return its regions, and this rank's peak."""
        while True:
            schedule, plan = self.ranks.shared(self._planned)
            self._check_shared(plan)
            found, applied = self._tried(plan)
            peak_bytes, found = self._quieter(applied, found)
            self.attempts.append(Attempt(plan, schedule, peak_bytes, found.memory))
            if peak_bytes <= self.budget.step_bytes:
                return applied, found.peak_bytes
            applied.remove()

    def _planned(self) -> tuple[Schedule, Plan]:
        profile, budget = self.profile, self.budget
        unseen = unseen_bytes(profile, self.plain)
        schedule, *_ = next_schedules(
            *(profile, budget, self.mode, self.attempts, unseen),
            is_late=lambda: self.deadline.forbids("annealing"),
            plain_fits=self.plain.peak_bytes <= budget.step_bytes,
        )
        plan = make_plan(profile, schedule, self.step.model, budget.step_bytes, unseen)
        return schedule, plan

    def _check_shared(self, plan: Plan) -> None:
        """Stop if a plan did not arrive on each rank as rank 0 made it."""
        digest = sha256(plan.to_json().encode()).hexdigest()
        digests = self.ranks.of_all(digest)
        assert set(digests) == {digest}, digests

    def _tried(self, plan: Plan) -> tuple[Metered, Applied]:
        """Apply a plan, verify one step, meter another, compare it with the plain one.

        Raises:
            RecomputeMismatchError: On all ranks, if anything differs on one.
        """
        if not plan.regions:
            return self.plain, Applied({}, {})
        applied = apply(self.step.model, plan)
        try:
            what = f"trying plan {len(self.attempts) + 1}"
            with stage(what), self.ranks.together(what):
                found = planned_run(self.step, applied)
                wrong = self._wrong(found)
            for rank, names in enumerate(wrong):
                if names:
                    raise RecomputeMismatchError(
                        f"{names[0]} differs from the plain step's on rank {rank}"
                    )
        except BaseException:
            applied.remove()
            raise
        return found, applied

    def _quieter(self, applied: Applied, found: Metered) -> tuple[int, Metered]:
        """Return the largest peak of all ranks, and this rank's step.

        On the CPU, a step over the budget is repeated: see `_quieter_run`.
        """
        runs = 0 if is_on_accelerator(self.step.device) else QUIETER_RUNS
        while True:
            (peak_bytes,) = self.ranks.most([found.peak_bytes])
            if peak_bytes <= self.budget.step_bytes or not runs:
                return peak_bytes, found
            runs -= 1
            with self.ranks.together("measuring the plan again"):
                again = planned_run(self.step, applied)
            found = min(found, again, key=attrgetter("peak_bytes"))

    def _wrong(self, found: Metered) -> list[list[str]]:
        """Return what each rank computes differently from plain steps that agree."""
        wrong = different(self.plain, found)
        for _ in range(REPEATS):
            if not any(self.ranks.of_all(bool(wrong))):
                break
            with without_plan(self.step.model, put_back=True):
                unrepeatable = different(self.plain, plain_run(self.step))
            wrong = [name for name in wrong if name not in unrepeatable]
        return self.ranks.of_all(wrong)


_Places = Sequence[tuple[str, str, int]]


def _difference(places: Sequence[_Places]) -> str:
    """Say at which operator the steps of the ranks part."""
    rank = next(rank for rank, of in enumerate(places) if of != places[0])
    first, other = places[0], places[rank]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False))
    number = len(list(same))
    return (
        "the ranks run different steps, so that no plan is for all of them: operator "
        f"{number} is {_named(first, number)} on rank 0 and {_named(other, number)} on "
        f"rank {rank}. Give every rank a batch that takes the same way through the "
        "model, or the same rule, as in apply(model, blocks=Block)"
    )


def _named(places: _Places, number: int) -> str:
    if number >= len(places):
        return "missing"
    name, path, count = places[number]
    return f"{name}, which makes {count} values in {path or 'the model'!r},"
