"""What `peers` measured, held against the bounds that this project set itself."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

# Of (ours - theirs) ÷ plain: where its interval must lie on that many models, and what
# its lower end must not exceed on any.
FASTER, FASTER_ON = -0.03, 6
SLOWER = 0.02

RESAMPLES = 2000

# What was measured of one model: `"peers"` has a row for each, by its name.
Found = dict[str, Any]


def interval(pairs: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median: percentiles of the bootstrap.

    Example:
        >>> interval([0.0] * 30)
        (0.0, 0.0)
    """
    draw = random.Random(0)
    medians = [
        statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)
    ]
    low, *_, high = statistics.quantiles(medians, n=40)
    return low, high


def fastest(found: Found) -> str | None:
    """Return the fastest peer of a model, if any works on it."""
    timed = {name: row for name, row in found["peers"].items() if "slowdown" in row}
    return min(timed, key=lambda name: float(timed[name]["slowdown"][1]), default=None)


def verdicts(results: dict[str, Found]) -> list[str]:
    """Say of each bound whether it was met.

    Args:
        results: What the benchmark measured, by the model's name.
    """
    beside = {
        name: found["peers"][peer]
        for name, found in results.items()
        if (peer := fastest(found)) is not None
    }
    ahead = [name for name, row in beside.items() if is_ahead(row)]
    behind = [name for name, row in beside.items() if is_behind(row)]
    need = min(FASTER_ON, len(results))
    return [
        f"ahead of the fastest peer by {-FASTER:.0%} of a plain step (upper end): "
        f"{len(ahead)} of {len(results)} models ({_listed(ahead)}), bound {need}: "
        f"{_met(len(ahead) >= need)}",
        f"behind the fastest peer by {SLOWER:.0%} (lower end): {_listed(behind)}; "
        f"bound none: {_met(not behind)}",
        f"behind any peer by {SLOWER:.0%}: {_of_all(results, is_behind)}",
        f"no plan fits at the peak of: {_of_all(results, _is_refused)}",
        f"peers that fail: {_of_all(results, lambda row: 'error' in row)}",
        "peers whose step is not the plain one: "
        f"{_of_all(results, lambda row: bool(row.get('differs')))}",
    ]


def is_ahead(row: dict[str, Any]) -> bool:
    """Say whether ours is clearly faster than a peer."""
    return not _is_refused(row) and row["difference"]["high"] < FASTER


def is_behind(row: dict[str, Any]) -> bool:
    """Say whether ours is clearly slower than a peer, or has no plan at its peak."""
    if "error" in row:
        return False
    return _is_refused(row) or row["difference"]["low"] > SLOWER


def _is_refused(row: dict[str, Any]) -> bool:
    return "error" in row.get("ours", {})


def _of_all(results: dict[str, Found], holds: Callable[[dict[str, Any]], bool]) -> str:
    return _listed(
        f"{name} ({peer})"
        for name, found in results.items()
        for peer, row in found["peers"].items()
        if holds(row)
    )


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT met"
