"""What the planner predicts, and how much it searches, on twelve profiles.

For each profile and each share the budget is the gradients' bytes and that share of
what the plain step's peak has above them. The table has the predicted slowdown and
peak, how many candidates were simulated, and how many operators that took: numbers that
depend on the code alone. Planning seconds (CPU time) stand beside, and are not saved.
Where no plan fits, the least share that one fits into stands instead.

`--without NAME` leaves a solver out, to see what it buys. `--before FILE` compares with
saved results: no slowdown and no least budget may rise, and no more may be simulated.

    python3 run.py bench solvers [--without nested] [--save NAME] [--before FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness import RESULTS, show
from rich.console import Console
from rich.table import Table
from solvers_models import SUBJECTS, step_graph

from membudget.errors import BudgetError
from membudget.planner import search
from membudget.planner.planner import SOLVERS, Planner

SHARES = (0.8, 0.6, 0.4, 0.2)
CACHE = Path("/tmp/membudget-solvers")
# Names of solvers and searches that `--without` leaves out.
PARTS = ("by_block", "nested", "priced", "fill", "anneal")


def measure(name: str, without: str | None) -> dict[str, Any]:
    """Return a row for each share, and the least budget that any plan fits into."""
    graph = step_graph(name, CACHE)
    start = time.process_time()
    solvers = [make for make in SOLVERS if make.__name__ != without]
    planner = Planner(graph, SUBJECTS[name].overheads, solvers)
    gradients = sum(s.bytes for s in graph.storages if s.kind == "gradient")
    above = planner.plain_peak_bytes - gradients
    rows = {
        str(share): _row(planner, gradients + int(share * above)) for share in SHARES
    }
    least_bytes = planner.least_bytes()
    return {
        "plain_peak_bytes": planner.plain_peak_bytes,
        "rows": rows,
        "least_bytes": least_bytes,
        "least_share": round((least_bytes - gradients) / above, 4),
        "candidates": planner.simulator.candidates,
        "operators": planner.simulator.operators,
        "seconds": time.process_time() - start,
    }


def _row(planner: Planner, budget_bytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"budget_bytes": budget_bytes}
    try:
        found = planner.fastest(budget_bytes)
    except BudgetError:
        return row | {"slowdown": None, "peak_bytes": None}
    return row | {"slowdown": round(found.slowdown, 6), "peak_bytes": found.peak_bytes}


def table(results: dict[str, Any], title: str) -> Table:
    """Return the results as a table: a profile a row, a share a column."""
    shown = Table(title=title)
    for head in ("profile", *(f"{share:.0%}" for share in SHARES)):
        shown.add_column(head, justify="right")
    for head in ("least share", "candidates", "operators", "seconds"):
        shown.add_column(head, justify="right")
    for name, found in results.items():
        cells = [
            "-" if row["slowdown"] is None else f"{row['slowdown']:.4f}"
            for row in found["rows"].values()
        ]
        shown.add_row(
            *(name, *cells, f"{found['least_share']:.4f}"),
            *(str(found["candidates"]), f"{found['operators']:,}"),
            f"{found['seconds']:.1f}",
        )
    return shown


def worse(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return every number of a profile that rose, in words."""
    rose = [
        f"{key} rose from {before[key]:,} to {after[key]:,}"
        for key in ("least_bytes", "candidates", "operators")
        if after[key] > before[key]
    ]
    for share, row in before["rows"].items():
        was, now = row["slowdown"], after["rows"][share]["slowdown"]
        if was is not None and (now is None or now > was + 1e-6):
            rose.append(f"the slowdown at {share} rose from {was} to {now}")
    return rose


def _left_out(part: str | None) -> AbstractContextManager[object]:
    """Return a patch that leaves one of the searches out."""
    if part == "fill":
        # It is called with and without a limit.
        return patch.object(search, "fill", lambda _, schedule, *__: schedule)
    if part == "anneal":
        return patch.object(search, "anneal", lambda *_: None)
    return nullcontext()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the figures, compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SUBJECTS)
    parser.add_argument("--without", choices=PARTS)
    parser.add_argument("--save", metavar="NAME")
    parser.add_argument("--before", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    names = [options.model] if options.model else list(SUBJECTS)
    results: dict[str, Any] = {}
    with _left_out(options.without):
        for name in names:
            results[name] = measure(name, options.without)
            print(name, f"{results[name]['seconds']:.1f} s", file=sys.stderr)
    show(Console(), table(results, f"without {options.without}"))
    for found in results.values():
        del found["seconds"]
    if options.save:
        text = json.dumps(results, indent=1) + "\n"
        (RESULTS / f"{options.save}.json").write_text(text)
    return _compare(results, options.before) if options.before else 0


def _compare(results: dict[str, Any], path: Path) -> int:
    before = json.loads(path.read_text())
    rose = [
        f"{name}: {line}"
        for name, found in results.items()
        for line in worse(before[name], found)
    ]
    print("\n".join(rose) or "nothing rose")
    return bool(rose)


if __name__ == "__main__":
    sys.exit(main())
