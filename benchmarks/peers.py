"""Checkpointing as others offer it, beside our plan of at most the same peak.

The peers: `gradient_checkpointing_enable` of transformers, on each block, on each
second and each third; torch's checkpoint on each block; torch's selective
checkpointing (SAC) and torch_remat, where it is installed, on each block, keeping what
multiplies matrices. Each is put on a copy of the model. A step is compared with the
plain one bit for bit (a difference stands in the table), the next one is metered.

For each of these peaks `fit` plans a copy within that budget. Its step must be the
plain one, bit for bit, and its peak at most the peer's.

Then all are timed in turns, in rounds whose order is drawn anew. A round gives each
peer one pair: (ours - theirs) ÷ plain. The 95 % interval is the bootstrap's, of the
median of at least thirty pairs. Time is the process's CPU time, on one thread, of
forward and backward with gradients made anew; the collector of garbage is off inside.

Conditions are equal: one process, one heap, which glibc is told to keep (see
`harness.keep_heap`), and three untimed steps of each before the first round. So no step
pays for memory that the system takes back from another, which would charge most to the
plain step, and page faults do not count for ours.

    python3 run.py bench peers [--seconds 480] [--rounds 30] [--model NAME]
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import others
from harness import on_one_thread, rounds_in_turns, save, show
from peers_models import LAYERS, SUBJECTS, Subject
from peers_verdicts import fastest, interval, verdicts
from rich.table import Table
from torch import nn
from ways import Way, has_torch_remat, ways

import membudget as mb
from membudget.step import Step

EVERY = (1, 2, 3)
OF_BLOCKS = ("torch checkpoint", "torch SAC, matmuls", "torch_remat, matmuls")
PLAIN = "plain"
# Seconds after which the first step of a peer is given up.
LIMIT = 300

Put = Callable[[nn.Module], object]


def peers(subject: Subject) -> dict[str, Put]:
    """Return what puts each peer on a model of this kind."""
    found: dict[str, Put] = {}
    for number in EVERY if subject.switches else ():
        found[f"transformers, every {number}"] = partial(_switch_on, number)
    installed = ways()
    for name in OF_BLOCKS:
        if name in installed:
            found[name] = partial(_put_on_blocks, installed[name], subject)
    return found


def _switch_on(every: int, model: Any) -> None:
    """Use the switch of transformers, with adapters as the manual of peft says."""
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable(every_n_layers=every)


def _put_on_blocks(way: Way, subject: Subject, model: nn.Module) -> None:
    for block in subject.blocks(model):
        # A second object of the same block, which is called as the first one was.
        block.forward = way(copy.copy(block))


class Arms:
    """The steps that are timed in turns: plain, each peer, ours for each peak.

    Attributes:
        steps: The steps, by name.
        plain_peak_bytes: The peak of the plain step.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        """Begin with the plain step; the model is copied, and never runs itself."""
        self._model, self._batch = model, batch
        step = self._new_step()
        # What a budget in bytes counts beside the step's own peak.
        self._before_bytes = mb.profile(step.model, batch).graph.static.total
        self._wanted = others.left_behind(step)
        gc.collect()
        self.plain_peak_bytes = mb.peak(step.run).peak_bytes
        step.prepare()
        self.steps = {PLAIN: step}

    def add_peer(self, name: str, put: Put) -> dict[str, Any]:
        """Add the step of a peer, unless it fails; return its row."""
        step = self._new_step()
        try:
            row = others.tried(others.Way(put), step, self._wanted, LIMIT)
        except Exception as error:
            return {"error": others.one_line(error)}
        self.steps[name] = step
        return row | {"peak_of_plain": row["peak_bytes"] / self.plain_peak_bytes}

    def add_ours(self, step_bytes: int) -> dict[str, Any]:
        """Add our step of at most this peak, if a plan fits; return its row."""
        step = self._new_step()
        budget_bytes = self._before_bytes + step_bytes
        try:
            fitted = mb.fit(step.model, self._batch, budget_bytes, measure="best")
        except mb.BudgetError as error:
            least_bytes = error.least_bytes - error.before_bytes
            return {"error": "no plan fits", "least_bytes": least_bytes}
        row = others.tried(others.Way(lambda _: None), step, self._wanted, LIMIT)
        assert not row["differs"], f"our step differs from plain in {row['differs']}"
        assert row["peak_bytes"] <= step_bytes, f"{row['peak_bytes']} > {step_bytes}"
        self.steps[ours(step_bytes)] = step
        engines = Counter(region.engine for region in fitted.plan.regions)
        raced = fitted.slowdown.median if fitted.slowdown else 1.0
        said = {
            "predicted": fitted.plan.slowdown,
            "raced": raced,
            "overhead_scale": fitted.attempts[-1].overhead_scale,
            "engines": dict(engines),
        }
        return row | said

    def _new_step(self) -> Step:
        return Step(copy.deepcopy(self._model), self._batch, None)


def ours(step_bytes: int) -> str:
    """Return the name of our step that has this peak at most."""
    return f"membudget, {step_bytes}"


def measure(subject: Subject, seconds: float, least_rounds: int) -> dict[str, Any]:
    """Return a row for each peer of a model."""
    arms = Arms(*subject.made())
    rows = {name: arms.add_peer(name, put) for name, put in peers(subject).items()}
    planned: dict[int, dict[str, Any]] = {}
    for row in rows.values():
        if "error" not in row:
            step_bytes = row["peak_bytes"]
            if step_bytes not in planned:
                planned[step_bytes] = arms.add_ours(step_bytes)
            row["ours"] = dict(planned[step_bytes])
    cases = {name: partial(others.run_step, step) for name, step in arms.steps.items()}
    rounds = rounds_in_turns(cases, seconds=seconds, least_rounds=least_rounds)
    for name, row in rows.items():
        _compare(name, row, rounds)
    return {
        "plain_peak_bytes": arms.plain_peak_bytes,
        "plain_ms": statistics.median(rounds[PLAIN]) / 1e3,
        "rounds": len(rounds[PLAIN]),
        "peers": rows,
    }


def _compare(name: str, row: dict[str, Any], rounds: dict[str, list[float]]) -> None:
    """Add to a peer's row what its time is, and what ours is beside it."""
    if "error" in row:
        return
    plain, theirs = rounds[PLAIN], rounds[name]
    row["slowdown"] = _quartiles(theirs, plain)
    own = rounds.get(ours(row["peak_bytes"]))
    if own is None:
        return
    row["ours"]["slowdown"] = _quartiles(own, plain)
    pairs = [(o - t) / p for o, t, p in zip(own, theirs, plain, strict=True)]
    low, high = interval(pairs)
    median = statistics.median(pairs)
    row["difference"] = {"median": median, "low": low, "high": high}


def _quartiles(times: Sequence[float], plain: Sequence[float]) -> list[float]:
    ratios = [time / base for time, base in zip(times, plain, strict=True)]
    return statistics.quantiles(ratios, n=4)


def table(name: str, found: dict[str, Any]) -> Table:
    """Return the rows as a table, peaks ÷ plain; the fastest peer has a star."""
    result = Table(
        title=f"{name}: plain {found['plain_peak_bytes'] / 2**20:.1f} MiB, "
        f"{found['plain_ms']:.0f} ms; {found['rounds']} rounds, "
        "median (quartiles) [95 % interval]"
    )
    for head in ("peer", "peak", "slowdown", "ours", "predicted", "ours - theirs"):
        result.add_column(head, no_wrap=True)
    result.add_column("our regions")
    result.add_column("differs")
    best = fastest(found)
    for peer, row in found["peers"].items():
        result.add_row(peer + " *" * (peer == best), *_cells(row))
    return result


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["error"][:60]]
    own, differs = row["ours"], ", ".join(row["differs"])
    cells = [f"{row['peak_of_plain']:.3f}", _spread(row["slowdown"])]
    if "error" in own:
        share = own["least_bytes"] / row["peak_bytes"]
        return [*cells, own["error"], "", f"least: {share:.3f} of it", "", differs]
    gap = row["difference"]
    engines = ", ".join(f"{count} {kind}" for kind, count in own["engines"].items())
    return [
        *cells,
        _spread(own["slowdown"]),
        f"{own['predicted']:.3f}",
        f"{gap['median']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]",
        engines or "none",
        differs,
    ]


def _spread(quartiles: Sequence[float]) -> str:
    low, median, high = quartiles
    return f"{median:.3f} ({low:.3f}, {high:.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480, help="for all models")
    parser.add_argument("--rounds", type=int, default=30, help="at least, each")
    chosen = {**SUBJECTS, **LAYERS}
    parser.add_argument("--model", choices=chosen, help="only this one")
    options = parser.parse_args(arguments)
    names = [options.model] if options.model else list(SUBJECTS)
    console, heap = on_one_thread()
    if not has_torch_remat():
        console.print("torch_remat: not installed (pip install torch_remat)")
    results: dict[str, Any] = {}
    for name in names:
        seconds = options.seconds / len(names)
        results[name] = measure(chosen[name], seconds, options.rounds)
        show(console, table(name, results[name]))
    said = verdicts(results)
    for line in said:
        console.print(line, soft_wrap=True)
    if options.model is None:
        content = {"heap": heap, **results, "verdicts": said}
        console.print(f"written to {save('peers', content).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
