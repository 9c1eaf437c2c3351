"""The fewest seconds of running operators again, as an integer programme.

The problem: which storages to keep from the forward, and, each time that the backward
asks for one that is not there, which makers to run and what to hold for later. The
formulation is Checkmate's (Jain et al. 2020), with stages at the demands of the
backward only, each of which runs what it needs and no more. For a demand d, a maker k
and an item s, with all variables 0 or 1:

    kept[s]       s stays from the forward
    held[d, s]    s was made again and is there when d begins             (their S)
    run[d, k]     k runs for d                                            (their R)

    there[d, s] = kept[s] + held[d, s] + run[d, maker(s)]

    min Σ seconds(k) · run[d, k]   such that
    1 ≤ there[d, s]                                  if d asks for s
    run[d, k] ≤ there[d, s]                          if k reads s
    run[d, k] ≤ Σ run[d, k']                         over the k' that read what k makes
    held[d + 1, s] ≤ held[d, s] + run[d, maker(s)]
    kept[s] + held[d, s] + Σ run[d', maker(s)] ≤ 1   over the d' in the stage d begins

and the bytes of every moment fit, which `alive` states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tests.oracles.problem import Problem
from tests.oracles.programme import ONE, Programme, Sum, added


class Choices:
    """The variables of a reduced step.

    Attributes:
        problem: The reduced step.
        programme: To which the variables belong.
        runs: The makers that may run for each demand.
        run: By demand and maker.
        held: By demand and item.
        kept: By item.
        stages: The demands that follow one another and are of one operator's saving.
    """

    def __init__(self, problem: Problem, unit_s: float):
        """Add the variables, but for those that can only be 0.

        Args:
            problem: The reduced step.
            unit_s: What costs are counted in.
        """
        self.problem = problem
        self.programme = Programme()
        self.run: dict[tuple[int, int], int] = {}
        self.held: dict[tuple[int, int], int] = {}
        useful = [self._add_runs(d, unit_s) for d in range(len(problem.demands))]
        self.runs: list[list[int]] = [[] for _ in useful]
        for d, k in sorted(self.run):
            self.runs[d].append(k)
        self._add_held(useful)
        of_use = sorted(set[int]().union(*useful))
        self.kept = {s: self.programme.variable() for s in of_use}
        self.stages = _stages([demand.stage for demand in problem.demands])
        self._asking: dict[int, list[int]] = {}
        for d, demand in enumerate(problem.demands):
            self._asking.setdefault(demand.item, []).append(d)

    def _add_runs(self, d: int, unit_s: float) -> set[int]:
        """Add the makers on the way to what is asked for; return what it is made of."""
        problem, demand = self.problem, self.problem.demands[d]
        pending, useful = [demand.item], {demand.item}
        while pending:
            k = problem.items[pending.pop()].maker
            if problem.makers[k].must_keep or (d, k) in self.run:
                continue
            cost = problem.makers[k].seconds / unit_s
            self.run[d, k] = self.programme.variable(cost)
            reads = [s for s in problem.makers[k].reads if not self.is_first_life(d, s)]
            pending += reads
            useful.update(reads)
        return useful

    def _add_held(self, useful: Sequence[set[int]]) -> None:
        """Add what an earlier demand may have made and a later one may need."""
        later = [set[int]()]
        for needed in reversed(useful):
            later.append(later[-1] | needed)
        made: set[int] = set()
        for d in range(len(useful)):
            for s in sorted(made & later[len(useful) - d]):
                self.held[d, s] = self.programme.variable()
            made.update(s for k in self.runs[d] for s in self.problem.makers[k].makes)

    def is_first_life(self, d: int, s: int) -> bool:
        """Return whether what the forward made is there, whatever is chosen."""
        return self.problem.demands[d].moment < self.problem.items[s].there_until

    def made(self, d: int, s: int) -> Sum:
        """Return whether an item is made again for a demand, or was before."""
        return {**self.before(d, s), **self.runs_to(d, s)}

    def runs_to(self, d: int, s: int) -> Sum:
        """Return whether an item is made again for a demand."""
        return _term(self.run.get((d, self.problem.items[s].maker)))

    def before(self, d: int, s: int) -> Sum:
        """Return whether an item was made again before a demand, and is there."""
        return _term(self.held.get((d, s)))

    def stays(self, s: int) -> Sum:
        """Return whether an item is kept."""
        return _term(self.kept.get(s))

    def goes(self, s: int) -> Sum:
        """Return whether an item is dropped."""
        return added({ONE: 1}, self.stays(s), -1)

    def lenders(self, d: int, s: int, moment: int) -> list[int]:
        """Return the demands up to `d` by which autograd has an item at a moment."""
        demands = self.problem.demands
        asking = self._asking.get(s, ())
        return [e for e in asking if e <= d and demands[e].freed > moment]

    # The rows.

    def add_rules(self) -> None:
        """State that what is asked for is there, and runs have their inputs."""
        for d, demand in enumerate(self.problem.demands):
            there = added(self.made(d, demand.item), self.stays(demand.item))
            self.programme.covers(there, {ONE: 1})
            for k in self.runs[d]:
                self._add_inputs(d, k)
                self._add_reason(d, k)
        for d, s in self.held:
            self.programme.covers(self.made(d - 1, s), self.before(d, s))
        for stage in self.stages:
            self._add_once(stage)

    def _add_inputs(self, d: int, k: int) -> None:
        for s in self.problem.makers[k].reads:
            if not self.is_first_life(d, s):
                there = added(self.made(d, s), self.stays(s))
                self.programme.covers(there, _term(self.run[d, k]))

    def _add_reason(self, d: int, k: int) -> None:
        """State that nothing runs that the demand does not need."""
        makes = self.problem.makers[k].makes
        total: Sum = {}
        for s in makes:
            missing = added(self.goes(s), self.before(d, s), -1)
            wanted: Sum = dict.fromkeys((run for _, run in self.readers(d, s)), 1)
            if s == self.problem.demands[d].item:
                wanted = missing
            elif len(makes) > 1:
                wanted = self._both(missing, wanted)
            total = added(total, wanted)
        self.programme.covers(total, _term(self.run[d, k]))

    def _both(self, first: Sum, second: Sum) -> Sum:
        """Return a variable that is at most each of two sums."""
        found = {self.programme.variable(): 1.0}
        self.programme.covers(first, found)
        self.programme.covers(second, found)
        return found

    def readers(self, d: int, s: int) -> list[tuple[int, int]]:
        """Return the operators that may read an item for a demand, and their runs."""
        return [
            (operator, self.run[d, k])
            for operator, k in self.problem.items[s].readers
            if (d, k) in self.run
        ]

    def _add_once(self, stage: range) -> None:
        """State that nothing is made again in a stage that is there, or was made."""
        for k in sorted({k for d in stage for k in self.runs[d]}):
            runs = {self.run[d, k]: 1 for d in stage if (d, k) in self.run}
            makes = self.problem.makers[k].makes
            self.programme.covers({ONE: 1}, runs)
            for s in makes:
                there = added(self.before(stage.start, s), self.stays(s))
                total = added(there, runs) if len(makes) == 1 else there
                self.programme.covers({ONE: 1}, total)


def _term(variable: int | None) -> dict[int, float]:
    return {} if variable is None else {variable: 1}


def _stages(stages: Sequence[int]) -> list[range]:
    borders = [d for d in range(1, len(stages)) if stages[d] != stages[d - 1]]
    ends = [0, *borders, len(stages)]
    return [range(first, end) for first, end in pairwise(ends) if first < end]
