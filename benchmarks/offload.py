"""What offloading costs on an emulated accelerator, whose clock is exact.

A GPT of eight blocks is trained with all that it saves offloaded, in several ways, over
links of several speeds. A link of 1 copies what a step saves to the host in the time of
its forward. Shown are virtual seconds and peak bytes of the device, each ÷ the plain
step's, of the third step: the first one is unknown, the second known.

A planned mix is what `fit` makes of it within a share of the plain peak: each tensor is
kept, recomputed, or moved to the host.

`save_on_cpu` is torch's. The offloaders of TRL and torchtune need CUDA, and are not
shown: nothing here ran on a GPU.

    python3 run.py bench offload [--links 0.5 1 2] [--window 0.25]
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import models
import torch
from harness import save, show
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import save_on_cpu

import membudget as mb
from membudget.offload.order import Order, Recorded

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.emulated import emu

LINKS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
STEPS = 3
RATES = {"float32": 1e10}, 1e9
"""Of the device: floating-point operations, and bytes of its memory, per second."""

SHARES = (0.5, 0.35)
"""Budgets of the planned mixes ÷ the plain peak."""

Around = Callable[[], AbstractContextManager[Any]]
Make = Callable[[], Around]


def unknown(order: Order) -> Iterator[int]:
    """Expect nothing, so that all is copied back when it is asked for."""
    yield from ()


def reversed_order(order: Order, step: Recorded | None) -> None:
    """Expect what was saved last to be asked for first."""
    order.expected, order.kept = step, set()
    order._coming = sorted(step.asked) if step else []


def arms(saved_bytes: int, share: float) -> dict[str, tuple[Make, Any]]:
    """Return what makes what is entered around each forward, and what is patched."""
    window = int(share * saved_bytes)

    def offloading(window: int, first: int | None = 0) -> Make:
        def make() -> Around:
            off = mb.offload(2 * saved_bytes, window=window, smallest=1024, first=first)
            return lambda: off

        return make

    nothing = nullcontext()
    return {
        "save_on_cpu": (lambda: lambda: save_on_cpu(True, "emu"), nothing),
        "no window: copies are waited for": (offloading(0), nothing),
        "copied back when asked for": (
            offloading(window),
            patch.object(Order, "coming", unknown),
        ),
        "ahead, in reversed order": (
            offloading(window),
            patch.object(Order, "_expect", reversed_order),
        ),
        "ahead, in recorded order": (offloading(window), nothing),
        "recorded order, first kept": (offloading(window, None), nothing),
    }


def step_of(
    link_bytes_per_s: float, around: Around, budget: int = 0, host: bool = False
) -> tuple[float, int]:
    """Return the virtual milliseconds and the peak bytes of the last of some steps.

    With a budget, the model is fitted into that many bytes, with or without the host.
    """
    emu.configure(
        segment_bytes=0,
        link_bytes_per_s=link_bytes_per_s,
        flops_per_s=RATES[0]["float32"],
        bytes_per_s=RATES[1],
        launch_s=0,
    )
    gc.collect()  # Graphs of earlier steps hold what they saved.
    torch.manual_seed(0)
    model, batch = models.gpt(blocks=8, width=64, heads=4, batch=4, length=64)
    model.to("emu")
    tokens, targets = (t.to("emu") for t in batch)
    if budget:
        device = mb.Device("emu", *RATES, link_bytes_per_s)
        room = "1GiB" if host else None
        options: dict[str, Any] = {"device": device, "measure": "none", "host": room}
        mb.fit(model, (tokens, targets), budget, **options)
    start, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    for _ in range(STEPS):
        model.zero_grad()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        start.record()
        with around():
            loss = model(tokens, targets)
        loss.backward()
        end.record()
        torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated()
    return float(start.elapsed_time(end)), int(peak)


def figures(links: Sequence[float], share: float) -> dict[str, dict[str, list[float]]]:
    """Return step time and peak of each arm ÷ plain, by link."""
    off = mb.offload("1GiB", window=0, smallest=1024)
    plain_ms, plain_bytes = step_of(1e9, nullcontext)
    step_of(1e9, lambda: off)
    saved_bytes = off.status().out_bytes // STEPS
    found: dict[str, dict[str, list[float]]] = {}

    def note(name: str, took_ms: float, peak_bytes: int) -> None:
        row = found.setdefault(name, {"step": [], "peak": []})
        row["step"].append(took_ms / plain_ms)
        row["peak"].append(peak_bytes / plain_bytes)

    for link in links:
        # A third of a step is its forward.
        bytes_per_s = saved_bytes / (link * plain_ms / 3e3)
        for name, (make, patched) in arms(saved_bytes, share).items():
            with patched:
                took_ms, peak_bytes = step_of(bytes_per_s, make())
            note(name, took_ms, peak_bytes)
        for part in SHARES:
            budget = int(part * plain_bytes)
            for has_host, name in (True, "planned mix"), (False, "recomputed"):
                took = step_of(bytes_per_s, nullcontext, budget, has_host)
                note(f"{name}, {part:.0%} of the peak", *took)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", type=float, nargs="+", default=LINKS)
    parser.add_argument("--window", type=float, default=0.25, help="share of the saved")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = figures(given.links, given.window)
    table = Table("step ÷ plain (peak ÷ plain), at a link of", *map(str, given.links))
    for name, row in found.items():
        cells = zip(row["step"], row["peak"], strict=True)
        table.add_row(name, *(f"{step:.2f} ({peak:.2f})" for step, peak in cells))
    show(Console(), table)
    print(save("offload", {"links": list(given.links), "arms": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
