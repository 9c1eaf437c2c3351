"""Solvers are asked for less until they fit; a simulator simulates nothing twice."""

from __future__ import annotations

import pytest

from membudget.planner.choice import Choice
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.solver import MAX_ATTEMPTS, Solver
from tests.planner.drafts import chain_of

GRAPH = chain_of([4, 4, 4], [1.0, 2.0, 3.0])


class Overshooting(Solver):
    """Believes that every storage fits for which there are so many bytes."""

    def __init__(self, bytes_for_each: int) -> None:
        super().__init__(Simulator(GRAPH))
        self.bytes_for_each = bytes_for_each
        self.asked: list[int] = []

    def solve(self, budget_bytes: int) -> int | None:
        self.asked.append(budget_bytes)
        kept = min(3, budget_bytes // self.bytes_for_each)
        return None if kept < 0 else kept

    def smallest(self) -> int:
        return 0

    def schedule(self, solution: int) -> Schedule:
        storages = [s for i in range(3) for s in GRAPH.born_at[i]]
        choice = Choice(0, 3, frozenset(storages[:solution]))
        return self._simulator.schedule((), [choice])


def test_a_solution_that_fits_is_the_last():
    plain_bytes = Simulator(GRAPH).simulate(()).peak_bytes
    solver = Overshooting(1)
    (schedule,) = solver.schedules(plain_bytes)
    assert schedule.peak_bytes <= plain_bytes
    assert solver.asked == [plain_bytes]


def test_a_solver_that_overshoots_is_asked_for_that_much_less():
    solver = Overshooting(1)
    schedules = list(solver.schedules(8))
    over = schedules[0].peak_bytes - 8
    assert over > 0
    assert solver.asked[:2] == [8, 8 - over]
    assert len(solver.asked) <= MAX_ATTEMPTS


def test_reductions_double_while_the_solution_stays_the_same():
    solver = Overshooting(1)
    list(solver.schedules(11))
    steps = [
        before - after
        for before, after in zip(solver.asked, solver.asked[1:], strict=False)
    ]
    assert steps[1] == 2 * steps[0]


def test_equal_choices_are_simulated_once():
    simulator = Simulator(GRAPH)
    first = simulator.simulate([Choice(0, 3)])
    assert simulator.simulate([Choice(0, 3)]) is first
    assert simulator.candidates == 1
    assert simulator.operators == len(GRAPH.operators) + len(first.recomputed)


@pytest.mark.parametrize(("plain_s", "slowdown"), [(4.0, 1.5), (0.0, 1.0)])
def test_the_slowdown_counts_recomputation_and_overhead(plain_s, slowdown):
    simulation = Simulator(GRAPH).simulate(())
    overhead_s = 6.0 - simulation.seconds
    assert Schedule((), (), simulation, overhead_s, plain_s).slowdown == slowdown


# The smallest schedules.


def test_the_least_are_the_smallest_solution_and_one_found_by_bisection():
    solver = Overshooting(1)
    first, second = solver.least
    assert first == second == solver.schedule(0)
    assert len(solver.asked) == MAX_ATTEMPTS == 12
    assert solver.asked[:2] == [first.peak_bytes // 2, first.peak_bytes // 4]


class Never(Overshooting):
    """Has a smallest solution, and finds nothing for any budget."""

    def solve(self, budget_bytes: int) -> int | None:
        self.asked.append(budget_bytes)
        return None


class Sure(Overshooting):
    """Has no smallest solution, and needs so many bytes."""

    def solve(self, budget_bytes: int) -> int | None:
        self.asked.append(budget_bytes)
        return 1 if budget_bytes >= self.bytes_for_each else None

    def smallest(self) -> None:  # type: ignore[override]
        return None


def test_bisection_ends_at_what_the_solver_needs():
    never = Never(1)
    assert never.least == [never.schedule(0)] * 2
    assert never.asked[-1] == never.schedule(0).peak_bytes - 1

    plain_bytes = Simulator(GRAPH).simulate(()).peak_bytes
    sure = Sure(3)
    assert sure.least == [sure.schedule(1)]
    assert sure.asked[0] == plain_bytes // 2
    assert sure.asked[-1] in (2, 3)
    assert Sure(plain_bytes + 1).least == []


def test_a_solver_has_no_smallest_solution_by_itself():
    solver = Overshooting(1)
    assert Solver.smallest(solver) is None
