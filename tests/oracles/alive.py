"""The bytes alive at every moment of a schedule, as rows of an integer programme.

The problem: a schedule fits if it does while each operator of the step runs, and while
each runs again. What is alive then is what no schedule moves, and items:

* a kept item lives as in the plain step, and on while something that is dropped, and
  still wanted, comes of it;
* an item that was made again lives until the last operator of the demand that reads it,
  or to the next demand if it is held;
* autograd has what it asked for until it frees it: the same memory, or a copy if it is
  read again in the stage, or held beyond it.

Checkmate (Jain et al. 2020) writes the second with products of bits. Here, for each
demand d, a variable for each reader of an item s says whether it or a later one runs,

    alive[d, s, reader] ≥ run[d, reader] − kept[s]
    alive[d, s, reader] ≥ alive[d, s, next reader]   after the last: held[d + 1, s]

and before the first reader an item is alive that is made or held: it will be read, or
held on. No row has more than four terms, and all are whole where the choices are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from membudget.graph import StepGraph
from tests.oracles.milp import Choices
from tests.oracles.problem import Item
from tests.oracles.programme import ONE, Sum, add, added


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
        self._copies: dict[int, Sum] = {}
        self._frees = sorted({item.freed for item in self._problem.items.values()})
        self._sources: dict[tuple[int, int], Sum] = {}
        self._outcomes: dict[tuple[int, int], Sum] = {}

    def add_rows(self) -> None:
        """State that every moment fits."""
        for terms, fixed_bytes in self._moments().items():
            self._fit(dict(terms), fixed_bytes)
        for d in range(len(self._problem.demands)):
            self._add_runs(d)

    def _fit(self, terms: Sum, fixed_bytes: float) -> None:
        unit = max(1, self._budget_bytes)
        self._programme.at_most(terms, self._budget_bytes - fixed_bytes, unit)

    # While the step's own operators run.

    def _moments(self) -> dict[tuple[tuple[int, float], ...], int]:
        """Return the most fixed bytes beside each sum that some moment has."""
        found: dict[tuple[tuple[int, float], ...], int] = {}
        demands, d = self._problem.demands, 0
        for moment, operator in enumerate(self._graph.operators):
            while d < len(demands) and demands[d].moment <= moment:
                d += 1
            terms = self._around(d, moment)
            for s, item in self._problem.items.items():
                add(terms, self._after(d - 1, s, moment), item.bytes)
            key = tuple(sorted((v, c) for v, c in terms.items() if c))
            fixed = self._problem.fixed_bytes[moment] + operator.workspace_bytes
            found[key] = max(found.get(key, 0), fixed)
        return found

    def _around(self, d: int, moment: int) -> dict[int, float]:
        """Return the bytes that neither a demand nor what is held before it moves."""
        terms: dict[int, float] = {}
        for item in (*self._problem.items.values(), *self._problem.sources):
            add(terms, self._kept(item, moment), item.bytes)
            add(terms, self._lent(d, item.storage, moment), item.bytes)
        return terms

    # What is kept.

    def _kept(self, item: Item, moment: int) -> Sum:
        if item.there_until <= moment < item.kept_until:
            return self._choices.stays(item.storage)
        if item.kept_until <= moment < item.needed_until:
            return self._is_source(item, bisect_right(self._frees, moment))
        return {}

    def _is_source(self, item: Item, frees: int) -> Sum:
        """Return whether an item is kept, and needed still after some frees."""
        key = item.storage, frees
        if key not in self._sources:
            stays = {ONE: 1} if item.maker < 0 else self._choices.stays(item.storage)
            reasons = [
                added(added(stays, self._outcome(s, frees)), {ONE: -1})
                for s in self._made_of(item)
            ]
            self._sources[key] = self._most(reasons)
        return self._sources[key]

    def _outcome(self, s: int, frees: int) -> Sum:
        """Return whether an item is dropped and it, or what comes of it, is wanted."""
        item, key = self._problem.items[s], (s, frees)
        if bisect_right(self._frees, item.needed_until - 1) < frees:
            return {}
        if bisect_right(self._frees, item.freed - 1) >= frees:
            return self._choices.goes(s)
        if key not in self._outcomes:
            stays = self._choices.stays(s)
            reasons = [
                added(self._outcome(t, frees), stays, -1) for t in self._made_of(item)
            ]
            self._outcomes[key] = self._most(reasons)
        return self._outcomes[key]

    def _made_of(self, item: Item) -> list[int]:
        makers = {self._problem.makers[k] for _, k in item.readers}
        return sorted({s for maker in makers for s in maker.makes})

    def _most(self, sums: Sequence[Sum]) -> Sum:
        """Return a new variable that is at least each of some sums."""
        found = {self._programme.variable(): 1.0}
        for terms in sums:
            self._programme.covers(found, terms)
        return found

    # What was made again, between runs.

    def _after(self, d: int, s: int, moment: int) -> Sum:
        """Return whether an item that was made again is there after a demand."""
        lenders = self._choices.lenders(d, s, moment)
        held = self._choices.before(d + 1, s)
        if not lenders:
            return held
        lent = added(self._choices.goes(s), self._copied(lenders[-1]), -1)
        if not self._copied(lenders[-1]):
            return lent  # It is in the memory that is held.
        key = d, s, -1 - lenders[-1]
        if key not in self._alive:
            self._alive[key] = self._most([lent, held])
        return self._alive[key]

    def _lent(self, d: int, s: int, moment: int) -> Sum:
        """Return how often autograd has an item beside what the region has."""
        demands = self._problem.demands
        lenders = self._choices.lenders(d - 1, s, moment)
        total: dict[int, float] = {}
        for e in lenders:
            add(total, self._copied(e), demands[e].times)
            if demands[e].stage != demands[lenders[-1]].stage:
                add(total, added(self._choices.goes(s), self._copied(e), -1))
        return total

    def _copied(self, d: int) -> Sum:
        """Return whether autograd gets a copy: what it asks for is needed again."""
        if d not in self._copies:
            choices, s = self._choices, self._problem.demands[d].item
            stage = next(stage for stage in choices.stages if d in stage)
            reasons: list[Sum] = [
                added({run: 1}, choices.stays(s), -1)
                for e in range(d + 1, stage.stop)
                for _, run in choices.readers(e, s)
            ]
            held = choices.before(stage.stop, s)
            reasons += [held] if held else []
            self._copies[d] = self._most(reasons) if reasons else {}
        return self._copies[d]

    # While operators run again.

    def _add_runs(self, d: int) -> None:
        """State that each operator fits that may run for a demand."""
        choices, problem = self._choices, self._problem
        moment = problem.demands[d].moment
        around = self._around(d, moment)
        born = self._graph.born_at.get(moment, ())
        # What the step's own operator makes is not there yet.
        fixed = problem.fixed_bytes[moment] - sum(
            self._graph.storages[s].bytes for s in born
        )
        items = {s for k in choices.runs[d] for s in problem.makers[k].makes}
        items |= {s for e, s in choices.held if e == d}
        for k in choices.runs[d]:
            for operator in problem.makers[k].operators:
                terms = added(around, self._passing(d, operator))
                workspace = self._graph.operators[operator].workspace_bytes
                add(terms, {choices.run[d, k]: workspace})
                for s in sorted(items):
                    add(terms, self._while(d, s, operator), problem.items[s].bytes)
                self._fit(terms, fixed)

    def _passing(self, d: int, operator: int) -> Sum:
        """Return the bytes of what is no item and is alive while an operator runs."""
        terms: dict[int, float] = {}
        for k in self._choices.runs[d]:
            for position, size in self._problem.makers[k].passing:
                if position == operator:
                    add(terms, {self._choices.run[d, k]: size})
        return terms

    def _while(self, d: int, s: int, operator: int) -> Sum:
        """Return whether an item is there, made again, while an operator runs."""
        choices, birth = self._choices, self._problem.items[s].birth
        if operator > birth:
            return self._from(d, s, operator)
        before = self._after(d - 1, s, self._problem.demands[d].moment)
        # What is there stays while its maker runs for the sake of something else.
        return before if operator < birth else added(before, choices.runs_to(d, s))

    def _from(self, d: int, s: int, operator: int) -> Sum:
        """Return whether an item that is made before an operator is needed from it."""
        choices, item = self._choices, self._problem.items[s]
        demand = self._problem.demands[d]
        if s == demand.item:
            return choices.goes(s)
        readers = choices.readers(d, s)
        later = [(position, run) for position, run in readers if position >= operator]
        is_alone = len(self._problem.makers[item.maker].makes) == 1
        if (
            later == readers
            and is_alone
            and not choices.lenders(d - 1, s, demand.moment)
        ):
            return choices.made(d, s)
        return self._read(d, s, later)

    def _read(self, d: int, s: int, readers: Sequence[tuple[int, int]]) -> Sum:
        """Return whether some operators read an item for a demand, or it is held."""
        if not readers:
            return self._after(d, s, self._problem.demands[d].moment)
        (position, run), rest = readers[0], readers[1:]
        key = d, s, position
        if key not in self._alive:
            runs = added({run: 1}, self._choices.stays(s), -1)
            self._alive[key] = self._most([runs, self._read(d, s, rest)])
        return self._alive[key]
