"""The predicted peak of a step beside the measured one, real and fake.

Each model of `profiled` at batch 1 and 8: the most bytes that one forward and backward
allocate by the meter, which counts every event of the allocator; and what
`membudget.profile` says from the graph of one recorded step, on real tensors and on
fake ones. Then what a profile costs, of plain steps, on a GPT of 12 blocks.

    python3 run.py bench peaks [--docs]

`--docs` writes the tables to docs/profile-peaks.md, too. Models of transformers need
the extra: pip install 'membudget[hf]'.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import machine, save
from models import WORKLOADS
from profiled import MODELS
from rich.console import Console

import membudget as mb
from membudget.step import Step

DOCS = Path(__file__).parents[1] / "docs" / "profile-peaks.md"
BATCHES = (1, 8)
BOUND = 0.02
MOST_STEPS, MOST_FAKE_S = 10, 2.0

Row = dict[str, Any]


def measure(name: str, batch: int) -> Row:
    """Return measured and predicted peaks of one model at one batch."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](batch)
    step = Step(model, inputs, None)
    step.run()
    step.prepare()
    stream = torch.get_rng_state()
    measured = mb.peak(step.run).peak_bytes
    step.prepare()
    row: Row = {"model": name, "batch": batch, "measured_bytes": measured}
    for kind in ("real", "fake"):
        torch.set_rng_state(stream)
        found = mb.profile(model, inputs, fake=kind == "fake")
        row[f"{kind}_bytes"] = found.peak_bytes
        row[f"{kind}_ratio"] = found.peak_bytes / measured
        row[f"{kind}_notes"] = list(found.notes)
    return row


def cost() -> dict[str, float]:
    """Return what profiles of the GPT of 12 blocks cost: steps, and seconds."""
    torch.manual_seed(0)
    model, inputs = WORKLOADS["compute-bound GPT"].make()
    step = Step(model, inputs, None)
    plain, real, fake = [], [], []
    for _ in range(3):
        plain.append(_seconds(step.run))
        step.prepare()
        real.append(_seconds(lambda: mb.profile(model, inputs)))
        fake.append(_seconds(lambda: mb.profile(model, inputs, fake=True)))
    return {
        "plain_step_s": median(plain),
        "real_profile_steps": median(real) / median(plain),
        "fake_profile_s": median(fake),
    }


def _seconds(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def markdown(rows: Sequence[Row], costs: dict[str, float]) -> str:
    """Return the page of the docs."""
    where = ", ".join(f"{key} {value}" for key, value in machine().items())
    lines = [
        "# The peak that a profile predicts",
        "",
        "The peak bytes that one forward and backward pass allocate, starting from "
        "`None` gradients: measured by `membudget.peak`, which counts every allocator "
        "event, and predicted by `membudget.profile` from the graph of one step. "
        f"`python3 run.py bench peaks --docs` regenerates this page ({where}).",
        "",
        "| model | batch | measured, bytes | real ÷ measured | fake ÷ measured |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['batch']} | {row['measured_bytes']:,} "
        f"| {row['real_ratio']:.4f} | {row['fake_ratio']:.4f} |"
        for row in rows
    ]
    lines += [
        "",
        "Mixtral multiplies its experts in one batch here: a loop over the experts "
        "that were chosen needs values, which fake tensors do not have.",
        "",
        "Cost of a profile on a GPT of 12 blocks (width 256, length 128, batch 8; same "
        f"command): as long as {costs['real_profile_steps']:.1f} plain steps on real "
        f"tensors with measured times, {costs['fake_profile_s']:.2f} s on fake ones.",
    ]
    return "\n".join(lines) + "\n"


def verdicts(rows: Sequence[Row], costs: dict[str, float]) -> list[str]:
    """Say of each bound whether it was met."""
    lines = []
    for kind in ("real", "fake"):
        errors = [abs(row[f"{kind}_ratio"] - 1) for row in rows]
        met = "met" if max(errors) <= BOUND else "NOT met"
        close = sum(error <= 0.005 for error in errors)
        lines.append(
            f"{kind}: largest error {max(errors):.4f}, bound {BOUND}: {met}; "
            f"{close} of {len(errors)} within 0.005"
        )
    steps, fake_s = costs["real_profile_steps"], costs["fake_profile_s"]
    met = "met" if steps <= MOST_STEPS else "NOT met"
    lines.append(f"real profile: {steps:.1f} plain steps, bound {MOST_STEPS}: {met}")
    met = "met" if fake_s <= MOST_FAKE_S else "NOT met"
    lines.append(f"fake profile: {fake_s:.2f} s, bound {MOST_FAKE_S}: {met}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the figures; 1 if a byte bound is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [measure(name, batch) for name in MODELS for batch in BATCHES]
    costs = cost()
    page = markdown(rows, costs)
    console = Console()
    console.print(page, markup=False)
    found = verdicts(rows, costs)
    for line in found:
        console.print(line)
    path = save("peaks", {"models": rows, "cost": costs, "verdicts": found})
    console.print(f"written to {path.name}")
    if options.docs:
        DOCS.parent.mkdir(exist_ok=True)
        DOCS.write_text(page)
    return int(any("NOT met" in line for line in found[:2]))


if __name__ == "__main__":
    sys.exit(main())
