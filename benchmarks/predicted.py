"""How far a step's time is from what its plan predicts.

The eight models of `peers`, and a GPT of width 64 whose operators are small, are each
planned for four shares of what the plain step takes above its gradients. The plain step
and the four planned ones are timed in turns, as in `peers`: CPU time, one thread, one
heap that is kept. A row has, for each share, the slowdown that the plan predicts, the
one that `fit` has measured, and the one measured here; then how far these are apart.

`--beside` keeps another core busy meanwhile, with products of matrices.

    python3 run.py bench predicted [--seconds 240] [--beside] [--model NAME]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import others
from harness import on_one_thread, rounds_in_turns, save, show
from models import WORKLOADS
from peers import PLAIN, Arms, ours
from peers_models import SUBJECTS, Subject
from rich.table import Table

SHARES = (0.8, 0.6, 0.4, 0.2)
SMALL = Subject(WORKLOADS["launch-bound GPT"].make, ("blocks",), switches=False)
MODELS = {**SUBJECTS, "GPT, width 64": SMALL}
# The bounds that this project set itself, on |predicted - measured|.
MEDIAN, WORST = 0.02, 0.08

BUSY = (
    "import torch; torch.set_num_threads(1); a = torch.randn(512, 512)\nwhile 1: a @ a"
)


@contextmanager
def other_load() -> Iterator[None]:
    """Keep a core busy."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(subject: Subject, seconds: float) -> dict[str, Any]:
    """Return a row for each share that a plan fits into."""
    model, batch = subject.made()
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    arms = Arms(model, batch)
    above_bytes = arms.plain_peak_bytes - gradient_bytes
    rows: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for part in SHARES:
        step_bytes = gradient_bytes + int(part * above_bytes)
        row, share = arms.add_ours(step_bytes), f"{part:.0%}"
        if "error" not in row:
            rows[share], names[share] = row, ours(step_bytes)
    cases = {name: partial(others.run_step, step) for name, step in arms.steps.items()}
    rounds = rounds_in_turns(cases, seconds=seconds, least_rounds=30)
    for share, name in names.items():
        pairs = zip(rounds[name], rounds[PLAIN], strict=True)
        rows[share]["measured"] = statistics.median(a / b for a, b in pairs)
    return rows


def off(row: dict[str, Any]) -> float:
    """Return by how much a plan is slower than it predicts."""
    return float(row["measured"] - row["predicted"])


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Return the slowdowns: a model a row, a share a column."""
    result = Table(title="predicted, measured by fit, measured here: off by")
    for head in ("", *(f"{share:.0%}" for share in SHARES)):
        result.add_column(head, no_wrap=True)
    for name, rows in found.items():
        cells = (rows.get(f"{share:.0%}") for share in SHARES)
        result.add_row(name, *("no plan" if r is None else _cell(r) for r in cells))
    return result


def _cell(row: dict[str, Any]) -> str:
    said = (row["predicted"], row["raced"], row["measured"])
    return ", ".join(f"{slowdown:.3f}" for slowdown in said) + f": {off(row):+.3f}"


def verdict(found: dict[str, dict[str, Any]]) -> str:
    """Say whether both bounds were met."""
    misses = [abs(off(row)) for rows in found.values() for row in rows.values()]
    middle, worst = statistics.median(misses), max(misses)
    is_met = middle <= MEDIAN and worst <= WORST
    return (
        f"off by {middle:.3f} in the median of {len(misses)}, bound {MEDIAN}; by "
        f"{worst:.3f} at worst, bound {WORST}: {'met' if is_met else 'NOT met'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="for all models")
    parser.add_argument("--beside", action="store_true", help="keep a core busy")
    parser.add_argument("--model", choices=MODELS, help="only this one")
    options = parser.parse_args(arguments)
    names = [options.model] if options.model else list(MODELS)
    console, _ = on_one_thread()
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        seconds = options.seconds / len(names)
        with other_load() if options.beside else nullcontext():
            found[name] = measure(MODELS[name], seconds)
    show(console, table(found))
    said = verdict(found)
    console.print(said, soft_wrap=True)
    if options.model is None:
        name = "predicted-beside" if options.beside else "predicted"
        console.print(f"written to {save(name, {**found, 'verdict': said}).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
