"""What `planners` measured, held against the bounds that this project set itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

# For the GPT-2: its measured slowdown, and how far the predicted one may lie above what
# any schedule needs, by the share.
SLOWDOWNS = {0.8: 1.06, 0.6: 1.10, 0.4: 1.15, 0.2: 1.22}
FROM_ANY = {0.8: 0.03, 0.6: 0.03, 0.4: 0.05}
# Seconds for a plan, of the GPT-2 and of the chain.
PLAN_S, CHAIN_S = 2, 20
# For all: the median error of the slowdown, the largest of the peak.
SLOWDOWN_ERROR, PEAK_ERROR = 0.05, 0.02
BOUNDED, CHAIN = "GPT-2, 12 blocks", "chain of 1000 blocks"

# The rows of plans, by the model's name and the share.
Planned = dict[str, dict[str, Any]]


def verdicts(results: dict[str, Any]) -> list[str]:
    """Say of each bound whether it was met.

    Args:
        results: What the benchmark measured, by the model's name.
    """
    planned: Planned = {
        name: {s: r for s, r in found["rows"].items() if "plan_s" in r}
        for name, found in results.items()
    }
    run = {name: of for name, of in planned.items() if name != CHAIN}
    return [
        *_of_gpt2(planned.get(BOUNDED, {})),
        *_unplanned(results),
        *_worst(f"{CHAIN}, seconds to plan", planned.get(CHAIN, {}), _plan_s, CHAIN_S),
        *_of_predictions(planned),
        *_of_all(run),
    ]


def _of_gpt2(rows: dict[str, Any]) -> Iterator[str]:
    if not rows:
        return
    for share, bound in SLOWDOWNS.items():
        if row := rows.get(str(share)):
            what = f"{BOUNDED}, {share:.0%}: measured slowdown"
            yield _judged(what, row["slowdown"], bound)
    for share, bound in FROM_ANY.items():
        if row := rows.get(str(share)):
            what = f"{BOUNDED}, {share:.0%}: predicted slowdown above any schedule's"
            yield _judged(what, row["predicted_slowdown"] - row["bound"], bound)
    yield from _worst(f"{BOUNDED}, seconds to plan", rows, _plan_s, PLAN_S)


def _unplanned(results: dict[str, Any]) -> Iterator[str]:
    none = [
        f"{name} {share}"
        for name, found in results.items()
        for share, row in found["rows"].items()
        if "plan_s" not in row
    ]
    yield _none_of("no plan fits at", none)


def _of_all(planned: Planned) -> Iterator[str]:
    """Say it of the plans that were run."""
    rows = _flat(planned)
    if not rows:
        return
    over = [n for n, row in rows.items() if row["peak_bytes"] > row["budget_bytes"]]
    yield _none_of(f"plans over their budget, of {len(rows)}", over)
    unequal = [name for name, row in rows.items() if not row["equal"]]
    yield _none_of("plans whose step is not the plain one", unequal)
    yield _none_of("peaks above that of a larger budget", _rises(planned, "peak_bytes"))
    yield from _worst(
        "predicted peak off the measured one",
        rows,
        lambda row: abs(row["predicted_peak_bytes"] / row["peak_bytes"] - 1),
        PEAK_ERROR,
    )
    errors = [abs(r["predicted_slowdown"] - r["slowdown"]) for r in rows.values()]
    what = f"median |predicted - measured slowdown|, of {len(errors)}"
    yield _judged(what, statistics.median(errors), SLOWDOWN_ERROR)


def _of_predictions(planned: Planned) -> Iterator[str]:
    """Say what a planner must not do, whatever runs."""
    faster = _rises(planned, "predicted_slowdown", sign=-1)
    yield _none_of("plans faster than that of a larger budget", faster)


def _flat(planned: Planned) -> dict[str, Any]:
    return {f"{name} {s}": row for name, of in planned.items() for s, row in of.items()}


def _rises(planned: Planned, key: str, sign: int = 1) -> list[str]:
    """Return where a smaller budget has more of something than the next larger one.

    Args:
        planned: The rows.
        key: What.
        sign: -1 for less in place of more.
    """
    return [
        f"{name} {smaller}"
        for name, of in planned.items()
        for larger, smaller in pairwise(of)
        if sign * of[smaller][key] > sign * of[larger][key]
    ]


def _none_of(what: str, names: list[str]) -> str:
    return f"{what}: {', '.join(names) or 'none'}"


def _plan_s(row: dict[str, Any]) -> float:
    return float(row["plan_s"])


def _worst(
    what: str,
    rows: dict[str, Any],
    value: Callable[[dict[str, Any]], float],
    bound: float,
) -> Iterator[str]:
    """Judge the largest value, and name where it is."""
    if rows:
        worst = max(rows, key=lambda name: value(rows[name]))
        yield _judged(f"{what}, most (at {worst})", value(rows[worst]), bound)


def _judged(what: str, value: float, bound: float) -> str:
    missed = "met" if value <= bound else f"NOT met, by {value - bound:.3f}"
    return f"{what}: {value:.4f}, bound {bound}: {missed}"
