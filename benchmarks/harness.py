"""What the benchmarks share: interleaved repeats, medians, a table, JSON.

Cases are timed in turns: every round times one batch of calls of each case, in an order
drawn anew. Whatever else the machine does then falls on all cases alike, and what is
reported of the rounds is the median with the lower quartile beside it; the quartile is
the better guess where the machine was busy, because other work only ever adds time.

Time is the process's CPU time, so that waiting for a core is not counted. The garbage
collector is off inside a batch: code that leaves reference cycles is not charged for
them here.
"""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from membudget.profile.devices import processor_model

RESULTS = Path(__file__).parent / "results"

Case = Callable[[], object]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # In malloc.h.
_MOST_IN_HEAP = 32 * 2**20
"""The largest block that glibc can be made to serve from its heap."""


@dataclass(frozen=True)
class Estimate:
    """One quantity, in microseconds, from the rounds of a benchmark.

    Estimates are added and scaled part by part: the median of what a region costs over
    plain is the difference of the medians, its quartile that of the quartiles.
    """

    median_us: float
    quartile_us: float

    @classmethod
    def of(cls, samples_us: list[float]) -> Estimate:
        """Summarise the rounds of one case."""
        return cls(
            statistics.median(samples_us), statistics.quantiles(samples_us, n=4)[0]
        )

    def __sub__(self, other: Estimate) -> Estimate:
        """Return the difference."""
        return Estimate(
            self.median_us - other.median_us, self.quartile_us - other.quartile_us
        )

    def __mul__(self, factor: float) -> Estimate:
        """Return the estimate times a number."""
        return Estimate(self.median_us * factor, self.quartile_us * factor)

    def ratio(self, other: Estimate) -> tuple[float, float]:
        """Return the ratio of the medians and that of the lower quartiles."""
        return (
            self.median_us / other.median_us,
            self.quartile_us / other.quartile_us,
        )


def in_turns(
    cases: Mapping[str, Case], *, seconds: float, batch_s: float = 0.004
) -> tuple[dict[str, Estimate], int]:
    """Time the cases in turns for about `seconds` of wall time.

    Args:
        cases: What to time, by name.
        seconds: When to stop; at least five rounds are made.
        batch_s: How long one batch of calls of a case should take.

    Returns:
        The estimate of one call for each case, and the number of rounds.
    """
    rounds = rounds_in_turns(cases, seconds=seconds, batch_s=batch_s)
    estimates = {name: Estimate.of(samples_us) for name, samples_us in rounds.items()}
    return estimates, len(next(iter(rounds.values())))


def rounds_in_turns(
    cases: Mapping[str, Case],
    *,
    seconds: float,
    batch_s: float = 0.004,
    least_rounds: int = 5,
) -> dict[str, list[float]]:
    """Time the cases in turns; return the microseconds of one call in each round.

    Samples of one round stand at the same place of each list, so that they can be
    compared with each other: what slowed the machine then slowed all of them.
    """
    counts = {name: _calls_in(case, batch_s) for name, case in cases.items()}
    samples_us: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    shuffle = random.Random(0).shuffle
    end_s = time.monotonic() + seconds
    rounds = 0
    while rounds < least_rounds or time.monotonic() < end_s:
        shuffle(order)
        for name in order:
            batch_ns = _batch_ns(cases[name], counts[name])
            samples_us[name].append(batch_ns / counts[name] / 1e3)
        rounds += 1
    return samples_us


def keep_heap() -> bool:
    """Make glibc keep the memory that is freed; say whether it does.

    By default it returns memory to the system at the end of a step, and the next step
    pays for a page fault at each 4 KiB: the more, the more bytes are live at its peak.
    Which steps pay, and for what, then depends on which step ran before.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = ((_M_MMAP_THRESHOLD, _MOST_IN_HEAP), (_M_TRIM_THRESHOLD, 2**31 - 1))
    return all(libc.mallopt(name, value) for name, value in settings)


def on_one_thread() -> tuple[Console, str]:
    """Prepare to time steps: one thread, no warnings, a heap that is kept.

    Returns:
        The console, on which the machine is described, and whether the heap is kept.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console, heap = Console(), "kept" if keep_heap() else "as it is"
    facts = {**machine(), "heap": heap}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()))
    return console, heap


def _batch_ns(case: Case, calls: int) -> int:
    gc.collect(0)
    gc.disable()
    try:
        start_ns = time.process_time_ns()
        for _ in range(calls):
            case()
        return time.process_time_ns() - start_ns
    finally:
        gc.enable()


def _calls_in(case: Case, batch_s: float) -> int:
    case()  # The first call fills caches; more of them, if there is time for more.
    calls = max(1, min(20, round(batch_s * 1e9 / max(1, _batch_ns(case, 1)))))
    _batch_ns(case, calls)
    return max(1, round(batch_s * 1e9 * calls / max(1, _batch_ns(case, calls))))


def machine() -> dict[str, str]:
    """Return what a reader must know of where the figures come from."""
    return {
        "cpu": processor_model() or "unknown cpu",
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def show(console: Console, table: Table) -> None:
    """Print a table, at its full width where the output is not a terminal."""
    if not console.is_terminal:
        console = Console(file=console.file, width=140)
    console.print(table)


def save(name: str, results: Mapping[str, Any]) -> Path:
    """Write the results as JSON, one file for each benchmark and processor.

    Args:
        name: The benchmark's name.
        results: Its figures; the machine's description is added.

    Returns:
        The file.
    """
    facts = machine()
    slug = re.sub(r"[^a-z0-9]+", "-", facts["cpu"].lower()).strip("-")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{slug}.json"
    content = json.dumps({"machine": facts, **results}, indent=2)
    path.write_text(content + "\n", encoding="utf-8")
    return path
