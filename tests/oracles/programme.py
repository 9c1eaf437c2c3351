"""A linear programme with integers, row by row, for the solver that SciPy brings.

HiGHS (Huangfu and Hall 2018) takes a sparse matrix; a formulation is written in sums
of variables. This is what lies between the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from scipy import optimize, sparse  # type: ignore[import-untyped]

Sum = Mapping[int, float]
"""Coefficients, by variable."""

ONE = -1
"""Stands for 1 in a sum, beside the variables."""

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

GAP = 1e-4
"""An answer that is at most this part of its cost above the bound is optimal."""


@dataclass(frozen=True)
class Answer:
    """What the solver found.

    Attributes:
        status: `"unknown"` if it found nothing in the time.
        values: Of the variables; empty without an answer.
        bound: No values cost less.
    """

    status: Status
    values: tuple[float, ...]
    bound: float


class Programme:
    """Variables that are 0 or 1, and rows that their sums obey."""

    def __init__(self) -> None:
        """Begin without variables."""
        self._costs: list[float] = []
        self._rows: list[tuple[Sum, float]] = []

    @property
    def size(self) -> int:
        """The number of variables."""
        return len(self._costs)

    @property
    def cost(self) -> Sum:
        """What is made least."""
        return {index: cost for index, cost in enumerate(self._costs) if cost}

    def variable(self, cost: float = 0.0) -> int:
        """Add a variable; return its number."""
        self._costs.append(cost)
        return self.size - 1

    def at_most(self, terms: Sum, bound: float, unit: float = 1.0) -> None:
        """Add a row: a sum is no more than a bound, both counted in a unit."""
        rest = {index: c for index, c in terms.items() if c and index != ONE}
        room = bound - terms.get(ONE, 0)
        if sum(c for c in rest.values() if c > 0) > room:
            scaled = {index: c / unit for index, c in rest.items()}
            self._rows.append((scaled, room / unit))

    def covers(self, larger: Sum, smaller: Sum) -> None:
        """Add a row: a sum is at least another."""
        self.at_most(added(smaller, larger, -1), 0)

    def solve(self, limit_s: float) -> Answer:
        """Find the values that cost least.

        Args:
            limit_s: How long to look.
        """
        if not self._costs:
            is_met = all(bound >= 0 for _, bound in self._rows)
            return Answer("optimal" if is_met else "infeasible", (), 0.0)
        columns = [index for terms, _ in self._rows for index in terms]
        entries = [c for terms, _ in self._rows for c in terms.values()]
        starts = np.cumsum([0, *(len(terms) for terms, _ in self._rows)])
        shape = (len(self._rows), self.size)
        matrix = sparse.csr_array((entries, columns, starts), shape=shape)
        bounds = np.array([bound for _, bound in self._rows])
        ask = partial(
            optimize.milp,
            np.array(self._costs),
            integrality=np.ones(self.size),
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=optimize.LinearConstraint(matrix, -np.inf, bounds),
        )
        return _ask(ask, limit_s)


def _ask(ask: Callable[..., Any], limit_s: float) -> Answer:
    """Ask the solver; where it finds that nothing is feasible, ask again.

    Simplifications that it makes at first sometimes lose every answer (HiGHS, issues
    1958 and 3090): it has to say so without them, too.
    """
    end = time.monotonic() + limit_s
    answer = _answer(ask(options={"time_limit": limit_s, "mip_rel_gap": GAP}))
    if answer.status == "infeasible":
        left_s = max(0.0, end - time.monotonic())
        options = {"time_limit": left_s, "mip_rel_gap": GAP, "presolve": False}
        answer = _answer(ask(options=options))
    return answer


def add(to: dict[int, float], terms: Sum, factor: float = 1) -> None:
    """Add a multiple of a sum to another."""
    for index, coefficient in terms.items():
        to[index] = to.get(index, 0) + factor * coefficient


def added(first: Sum, second: Sum, factor: float = 1) -> dict[int, float]:
    """Return a sum, and a multiple of another added to it."""
    total = dict(first)
    add(total, second, factor)
    return total


def _answer(found: Any) -> Answer:
    """Read what SciPy returns."""
    if found.x is None:
        is_infeasible = "nfeasible" in found.message
        status: Status = "infeasible" if is_infeasible else "unknown"
        bound = float("inf") if is_infeasible else found.mip_dual_bound or 0.0
        return Answer(status, (), bound)
    status = "optimal" if found.status == 0 else "feasible"
    bound = found.mip_dual_bound
    return Answer(status, tuple(found.x), 0.0 if bound is None else float(bound))
