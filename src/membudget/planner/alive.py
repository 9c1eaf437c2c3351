"""The bytes alive at every moment of a schedule, as rows of an integer programme.

The problem: a schedule fits if it does while each operator of the step runs, and while
each runs again. What is alive then are storages that no schedule moves, and items:

* a kept item lives as in the plain step, and on while something that is dropped, and
  still wanted, comes of it;
* an item that was made again lives until the last operator of the demand that reads it,
  until autograd frees it, or to the next demand if it is held.

Checkmate writes the second with products of bits. Here, for the demand d, a rank of
each later reader of the item s says whether it or one after it runs:

    alive[d, s, i] ≥ run[d, reader i] − kept[s]
    alive[d, s, i] ≥ alive[d, s, i + 1]              the last: held[d + 1, s]

which has as many rows, is integral where `run`, `held` and `kept` are, and needs no
more than two terms beside. Before the first reader, what is there is what will be read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from membudget.graph import StepGraph
from membudget.planner.makers import Item
from membudget.planner.milp import Choices
from membudget.planner.programme import ONE, Sum, add, added


class Room:
    """The rows that hold a schedule within a budget."""

    def __init__(self, graph: StepGraph, choices: Choices, budget_bytes: int):
        """Take the variables, and what they must fit into."""
        self._graph = graph
        self._choices = choices
        self._problem = choices.problem
        self._programme = choices.programme
        self._budget_bytes = budget_bytes
        self._alive: dict[tuple[int, int, int], Sum] = {}
        self._sources: dict[tuple[int, int], Sum] = {}
        self._comes: dict[tuple[int, int], Sum] = {}
        self._frees = sorted({item.freed for item in self._problem.items.values()})
        self._copies: dict[int, Sum] = {}

    def add_rows(self) -> None:
        """State that every moment fits."""
        for terms, constant in self._moments().items():
            self._fit(dict(terms), constant)
        for d in range(len(self._problem.demands)):
            self._add_runs(d)

    def _fit(self, terms: Sum, fixed_bytes: int) -> None:
        unit = max(1, self._budget_bytes)
        self._programme.at_most(terms, self._budget_bytes - fixed_bytes, unit)

    # While the step's own operators run.

    def _moments(self) -> dict[tuple[tuple[int, float], ...], int]:
        """Return the most fixed bytes for each sum that some moment has."""
        found: dict[tuple[tuple[int, float], ...], int] = {}
        done = 0
        for moment, operator in enumerate(self._graph.operators):
            while self._is_served(done, moment):
                done += 1
            terms = self._around(done, moment)
            for s in self._problem.items:
                add(terms, self._after(done - 1, s, moment), self._bytes(s))
            key = tuple(sorted((v, c) for v, c in terms.items() if c))
            fixed = self._problem.fixed_bytes[moment] + operator.workspace_bytes
            found[key] = max(found.get(key, 0), fixed)
        return found

    def _is_served(self, d: int, moment: int) -> bool:
        demands = self._problem.demands
        return d < len(demands) and demands[d].moment <= moment

    def _bytes(self, s: int) -> int:
        return self._problem.items[s].bytes

    def _around(self, d: int, moment: int) -> dict[int, float]:
        """Return the bytes of what is kept, and of what autograd alone has."""
        terms: dict[int, float] = {}
        for item in self._problem.items.values():
            add(terms, self._kept(item, moment), item.bytes)
            add(terms, self._lent(d, item.storage, moment), item.bytes)
        return terms

    def _after(self, d: int, s: int, moment: int) -> Sum:
        """Return whether an item that was made again is there after a demand."""
        lenders = self._choices.lenders(d, s, moment)
        held = self._choices.before(d + 1, s)
        if not lenders:
            return held
        # Autograd has what the region has, or a copy.
        shared = added(self._choices.goes(s), self._copied(lenders[-1]), -1)
        if not self._copied(lenders[-1]):
            return shared
        return self._most((d, s, -1 - lenders[-1]), shared, held)

    def _most(self, key: tuple[int, int, int], *sums: Sum) -> Sum:
        """Return a variable that is at least each of some sums."""
        if key not in self._alive:
            found = {self._programme.variable(is_integer=False): 1.0}
            self._alive[key] = found
            for terms in sums:
                self._programme.covers(found, terms)
        return self._alive[key]

    def _lent(self, d: int, s: int, moment: int) -> Sum:
        """Return how many times autograd has an item beside what the region has."""
        lenders = self._choices.lenders(d - 1, s, moment)
        total: dict[int, float] = {}
        for e in lenders:
            times = self._problem.demands[e].times
            add(total, self._copied(e), times)
            if self._problem.demands[e].stage != self._problem.demands[lenders[-1]].stage:
                add(total, added(self._choices.goes(s), self._copied(e), -1))
        return total

    def _copied(self, d: int) -> Sum:
        """Return whether autograd gets a copy: what is asked for is needed again."""
        if d not in self._copies:
            choices, s = self._choices, self._problem.demands[d].item
            stage = next(stage for stage in choices.stages if d in stage)
            reasons = [choices.before(stage.stop, s)]
            for e in range(d + 1, stage.stop):
                for run in choices.readers(e, [s]):
                    reasons.append(added({run: 1}, choices.stays(s), -1))
            self._copies[d] = {}
            if any(reasons):
                copy = {self._programme.variable(is_integer=False): 1.0}
                self._copies[d] = copy
                for reason in reasons:
                    self._programme.covers(copy, reason)
        return self._copies[d]

    # What is kept.

    def _kept(self, item: Item, moment: int) -> Sum:
        if item.there_until <= moment < item.kept_until:
            return self._choices.stays(item.storage)
        if item.kept_until <= moment < item.needed_until:
            return self._is_source(item, bisect_right(self._frees, moment))
        return {}

    def _is_source(self, item: Item, after: int) -> Sum:
        """Return whether an item is kept, and something comes of it after some frees."""
        key = item.storage, after
        if key not in self._sources:
            found = {self._programme.variable(is_integer=False): 1.0}
            self._sources[key] = found
            for s in self._outcomes(item):
                both = added(self._choices.stays(item.storage), self._come(s, after))
                self._programme.covers(found, added(both, {ONE: -1}))
        return self._sources[key]

    def _come(self, s: int, after: int) -> Sum:
        """Return whether an item is dropped and it, or what comes of it, is wanted."""
        item, key = self._problem.items[s], (s, after)
        if bisect_right(self._frees, item.needed_until - 1) < after:
            return {}
        if key not in self._comes:
            if bisect_right(self._frees, item.freed - 1) >= after:
                self._comes[key] = self._choices.goes(s)
                return self._comes[key]
            found = {self._programme.variable(is_integer=False): 1.0}
            self._comes[key] = found
            for t in self._outcomes(item):
                still = added(self._come(t, after), self._choices.stays(s), -1)
                self._programme.covers(found, still)
        return self._comes[key]

    def _outcomes(self, item: Item) -> list[int]:
        makers = {self._problem.makers[k] for _, k in item.readers}
        return sorted({s for maker in makers for s in maker.makes})

    # While operators run again.

    def _add_runs(self, d: int) -> None:
        """State that each operator fits that may run for a demand."""
        choices, problem = self._choices, self._problem
        moment = problem.demands[d].moment
        around = self._around(d, moment)
        born = self._graph.born_at.get(moment, ())
        fixed = problem.fixed_bytes[moment]
        # What the step's own operator makes is not there yet.
        fixed -= sum(
            self._graph.storages[s].bytes for s in born if s not in problem.items
        )
        items = {s for k in choices.runs[d] for s in problem.makers[k].makes}
        items |= {s for e, s in choices.held if e == d}
        for operator, k in self._operators(d):
            terms = added(around, {choices.run[d, k]: 1}, self._workspace(operator))
            for s in sorted(items):
                add(terms, self._while(d, s, operator), self._bytes(s))
            for maker in choices.runs[d]:
                for position, size in problem.makers[maker].passing:
                    if position == operator:
                        add(terms, {choices.run[d, maker]: size})
            self._fit(terms, fixed)

    def _operators(self, d: int) -> Iterator[tuple[int, int]]:
        for k in self._choices.runs[d]:
            for operator in self._problem.makers[k].operators:
                yield operator, k

    def _workspace(self, operator: int) -> int:
        return self._graph.operators[operator].workspace_bytes

    def _while(self, d: int, s: int, operator: int) -> Sum:
        """Return whether an item that was made again is there while an operator runs."""
        choices, birth = self._choices, self._problem.items[s].birth
        moment = self._problem.demands[d].moment
        if operator > birth:
            return self._from(d, s, operator)
        before = self._after(d - 1, s, moment)
        if operator < birth:
            return before
        return added(before, choices.runs_to(d, s))

    def _from(self, d: int, s: int, operator: int) -> Sum:
        """Return whether an item that is made before an operator is read from it on."""
        choices, item = self._choices, self._problem.items[s]
        demand = self._problem.demands[d]
        if s == demand.item:
            return choices.goes(s)
        after = self._after(d, s, demand.moment)
        readers = [
            (position, choices.run[d, k])
            for position, k in item.readers
            if (d, k) in choices.run
        ]
        later = [row for row in readers if row[0] >= operator]
        is_lent = choices.lenders(d, s, demand.moment)
        is_alone = len(self._problem.makers[item.maker].makes) == 1
        if later == readers and is_alone and not is_lent:
            # What is there is there to be read, or to be held.
            return choices.made(d, s)
        return self._read(d, s, later, after)

    def _read(
        self, d: int, s: int, readers: Sequence[tuple[int, int]], after: Sum
    ) -> Sum:
        if not readers:
            return after
        (position, run), rest = readers[0], readers[1:]
        key = d, s, position
        if key in self._alive:
            return self._alive[key]
        runs = added({run: 1}, self._choices.stays(s), -1)
        return self._most(key, runs, self._read(d, s, rest, after))
