"""What keeping some activations costs a whole step, in time and in bytes.

Four models, each checkpointed a block at a time in every way that `ways` knows. Before
anything is timed, a way must give the loss and the gradients of the plain step bit for
bit; one that raises instead stands in the table with what it said.

Time is that of forward and backward. Overhead is what a way takes over plain, as a
fraction of what torch's selective checkpointing takes over plain with the same choice:
keep what multiplies matrices, recompute the rest.

Peak is exact: the most bytes alive during one forward and backward, above what was
alive before. Gradients are `None` before, as after `zero_grad()`, so that their bytes
count; the inner peak is that with gradients that were there before, so that their bytes
do not. Where the model is large and its batch small, the peak lies at the end of the
backward, where all gradients are alive, and says little of the activations.

    python3 run.py bench selective [--seconds 240] [--model MLP]
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Estimate, in_turns, machine, save, show
from models import WORKLOADS, Model, Workload
from rich.console import Console
from rich.table import Table
from steps import Batch, difference, fresh_step, outcome, peaks
from ways import LEAST, PLAIN, REPLAY, SAC, Way, has_torch_remat, ways

# The bounds that this project set itself: peak and overhead of replay, as fractions of
# those of torch's selective checkpointing with the same choice of what to keep.
BOUNDS = {"launch-bound GPT": (0.91, 0.25), "compute-bound GPT": (0.91, 0.6)}


@dataclass(frozen=True)
class Measured:
    """What one way costs on one model.

    Attributes:
        time: Of forward and backward.
        peak_bytes: The peak, with gradients `None` before.
        inner_peak_bytes: The peak, with gradients that were there before.
        note: How it differs from plain where it may.
    """

    time: Estimate
    peak_bytes: int
    inner_peak_bytes: int
    note: str


def measure(
    workload: Workload, candidates: dict[str, Way], seconds: float
) -> tuple[dict[str, Measured], dict[str, str], int]:
    """Check every way, take its peaks, then time all in turns.

    Args:
        workload: The model.
        candidates: The ways, the plain one among them.
        seconds: How long to time.

    Returns:
        What was measured, what was said by ways that refuse this model, and how many
        rounds were timed.
    """
    torch.manual_seed(0)
    origin, batch = workload.make()
    plain = outcome(copy.deepcopy(origin), batch)
    models: dict[str, Model] = {}
    notes: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, way in candidates.items():
        model = copy.deepcopy(origin)
        model.runs = tuple(way(block) for block in model.blocks)
        try:
            result = outcome(model, batch)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        notes[name] = difference(plain, result, name)
        models[name] = model
    at_peak = {name: peaks(model, batch) for name, model in models.items()}
    times, rounds = in_turns(
        {name: _case(model, batch) for name, model in models.items()},
        seconds=seconds,
        batch_s=0.05,
    )
    measured = {
        name: Measured(times[name], *at_peak[name], notes[name]) for name in models
    }
    return measured, refused, rounds


def _case(model: Model, batch: Batch) -> Any:
    return lambda: fresh_step(model, batch)


def overhead(found: dict[str, Measured], name: str) -> tuple[float, float]:
    """Return a way's time over plain as a fraction of SAC's, median and quartile."""
    plain = found[PLAIN].time
    return (found[name].time - plain).ratio(found[SAC].time - plain)


def table(title: str, found: dict[str, Measured], refused: dict[str, str]) -> Table:
    """Return one row for each way, median (quartile)."""
    result = Table(title=title)
    heads = ("ms", "÷ plain", "overhead ÷ SAC's", "peak MiB", "÷ SAC", "inner MiB")
    result.add_column("")
    for head in heads:
        result.add_column(head, justify="right")
    result.add_column("note")
    for name, way in found.items():
        ratio, ratio_quartile = way.time.ratio(found[PLAIN].time)
        over, over_quartile = overhead(found, name)
        result.add_row(
            name,
            f"{way.time.median_us / 1e3:.2f} ({way.time.quartile_us / 1e3:.2f})",
            f"{ratio:.3f} ({ratio_quartile:.3f})",
            "" if name == PLAIN else f"{over:.2f} ({over_quartile:.2f})",
            f"{way.peak_bytes / 2**20:.2f}",
            f"{way.peak_bytes / found[SAC].peak_bytes:.3f}",
            f"{way.inner_peak_bytes / 2**20:.2f}",
            way.note,
        )
    for name, said in refused.items():
        result.add_row(name, *[""] * len(heads), said[:60])
    return result


def verdicts(name: str, found: dict[str, Measured]) -> list[str]:
    """Say of each bound whether it was met; nothing is asserted, times are noisy."""
    if name not in BOUNDS or REPLAY not in found:
        return []
    peak_bound, time_bound = BOUNDS[name]
    replay, sac, least = found[REPLAY], found[SAC], found[LEAST]
    rows = (
        (
            "overhead over plain",
            *overhead(found, REPLAY),
            time_bound,
            "lower quartiles",
        ),
        (
            "peak",
            replay.peak_bytes / sac.peak_bytes,
            least.peak_bytes / sac.peak_bytes,
            peak_bound,
            "everything recomputed",
        ),
        (
            "inner peak",
            replay.inner_peak_bytes / sac.inner_peak_bytes,
            least.inner_peak_bytes / sac.inner_peak_bytes,
            peak_bound,
            "everything recomputed",
        ),
    )
    return [
        f"{name}, {REPLAY}, {what}: {ratio:.3f} of SAC's ({beside}: {other:.3f}), "
        f"bound {bound}: {'met' if ratio <= bound else 'NOT met'}"
        for what, ratio, other, bound, beside in rows
    ]


def figures(found: dict[str, Measured], refused: dict[str, str]) -> dict[str, Any]:
    """Return what goes into the JSON of one model."""
    rows: dict[str, Any] = {
        name: {
            "median_us": way.time.median_us,
            "quartile_us": way.time.quartile_us,
            "of_plain": way.time.ratio(found[PLAIN].time)[0],
            "overhead_of_sac": overhead(found, name)[0],
            "peak_bytes": way.peak_bytes,
            "inner_peak_bytes": way.inner_peak_bytes,
            "note": way.note,
        }
        for name, way in found.items()
    }
    return rows | {name: {"refused": said} for name, said in refused.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="for all models")
    parser.add_argument("--model", choices=WORKLOADS, help="only this one")
    parsed = parser.parse_args(arguments)
    chosen = [parsed.model] if parsed.model else list(WORKLOADS)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.utils.checkpoint")
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    if not has_torch_remat():
        console.print("torch_remat: not installed (pip install torch_remat)")
    results: dict[str, Any] = {}
    said: list[str] = []
    for name in chosen:
        workload = WORKLOADS[name]
        found, refused, rounds = measure(workload, ways(), parsed.seconds / len(chosen))
        title = f"{workload.title}: {rounds} rounds, median (quartile)"
        show(console, table(title, found, refused))
        said += verdicts(name, found)
        results[name] = figures(found, refused)
    for line in said:
        console.print(line, soft_wrap=True)
    results["verdicts"] = said
    if not parsed.model:
        console.print(f"written to {save('selective', results).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
