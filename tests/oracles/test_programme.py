"""Rows, sums, and what the solver says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.oracles import programme as programme_module
from tests.oracles.programme import ONE, Programme, added


def test_sums_add_up():
    assert added({1: 2, ONE: 1}, {1: 1, 3: 4}, -2) == {1: 0, ONE: 1, 3: -8}


def cheapest(programme: Programme) -> tuple[float, ...]:
    return tuple(round(value) for value in programme.solve(10.0).values)


def test_the_cheapest_cover_is_found():
    programme = Programme()
    dear, cheap = programme.variable(3.0), programme.variable(2.0)
    programme.covers({dear: 1, cheap: 1}, {ONE: 1})
    answer = programme.solve(10.0)
    assert (answer.status, answer.bound) == ("optimal", 2.0)
    assert cheapest(programme) == (0, 1)


def test_units_change_nothing():
    for unit in (1, 1 << 40):
        programme = Programme()
        items = [programme.variable(-value) for value in (5.0, 4.0, 3.0)]
        sizes = {item: size * unit for item, size in zip(items, (4, 3, 2), strict=True)}
        programme.at_most(added(sizes, {ONE: unit}), 6 * unit, unit)
        assert cheapest(programme) == (0, 1, 1)


def test_a_row_that_nothing_meets_is_infeasible():
    programme = Programme()
    programme.covers({programme.variable(): 1}, {ONE: 2})
    answer = programme.solve(10.0)
    assert (answer.status, answer.values) == ("infeasible", ())


@pytest.mark.parametrize(("room", "status"), [(1, "optimal"), (-1, "infeasible")])
def test_rows_without_variables_are_read_without_the_solver(room, status):
    programme = Programme()
    programme.at_most({ONE: 1}, 1 + room)
    assert programme.solve(10.0).status == status


def test_nothing_is_infeasible_before_the_solver_says_so_twice(monkeypatch):
    """It may lose all answers in what it calls presolve."""
    asked: list[dict[str, Any]] = []

    def solver(*_: object, options: dict[str, Any], **__: object) -> SimpleNamespace:
        asked.append(options)
        if options.get("presolve", True):
            return SimpleNamespace(x=None, message="Infeasible", mip_dual_bound=None)
        return SimpleNamespace(x=np.ones(1), status=0, mip_dual_bound=1.0)

    monkeypatch.setattr("scipy.optimize.milp", solver)
    programme = Programme()
    programme.variable(1.0)
    assert programme.solve(10.0).status == "optimal"
    assert [options.get("presolve", True) for options in asked] == [True, False]
    assert asked[0]["mip_rel_gap"] == programme_module.GAP
