"""Loops under a budget beside plans that `fit` makes for their very step.

Twenty loops: five models, each within four shares of its plain step's activations. One
copy is trained inside of `budget`, which has seen eight steps, another under the plan
that `fit` makes of the same step within the same bytes. Both are timed in turns with
the plain step (CPU time, one thread, heap kept). The budget is open only while its own
steps run, so that what counting allocations costs is counted for it alone.

    python3 run.py bench loops [--rounds 15] [--model GPT]
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from harness import keep_heap, machine, save
from models import WORKLOADS, Model, Workload, gpt
from steps import Batch, fresh_step

import membudget as mb
from membudget.loop import Budgeted

SHARES = (0.8, 0.65, 0.5, 0.35)
WARM = 8
"""Steps before any is timed."""

MODELS = {
    **WORKLOADS,
    "GPT": Workload(
        "GPT of 6 blocks, width 128, 4 heads; batch 8, length 64",
        lambda: gpt(blocks=6, width=128, heads=4, batch=8, length=64),
    ),
}

Timed = Callable[[], float]


def timed(model: Model, batch: Batch) -> float:
    """Run a step; return its CPU seconds."""
    gc.collect(0)
    gc.disable()
    try:
        start_s = time.process_time()
        fresh_step(model, batch)
        return time.process_time() - start_s
    finally:
        gc.enable()


def in_loop(budget: Budgeted, model: Model, batch: Batch) -> float:
    """Open the budget, run a step that is not timed, and time the next one."""
    with budget:
        fresh_step(model, batch)
        return timed(model, batch)


def ways(model: Model, batch: Batch, asked: str) -> tuple[dict[str, Timed], float]:
    """Return what is timed, and the slowdown that `fit` predicts."""
    planned, looped = copy.deepcopy(model), copy.deepcopy(model)
    fitted = mb.fit(planned, batch, asked)
    budget = mb.budget(looped, asked)
    with budget:
        for _ in range(WARM):
            fresh_step(looped, batch)
            looped.zero_grad()
    return {
        "plain": lambda: timed(model, batch),
        "fit": lambda: timed(planned, batch),
        "loop": lambda: in_loop(budget, looped, batch),
    }, fitted.plan.slowdown


def slowdowns(cases: dict[str, Timed], rounds: int) -> tuple[float, float]:
    """Return the medians of fit's and the loop's step ÷ the plain one."""
    for case in cases.values():
        for _ in range(3):
            case()
    order, samples = list(cases), []
    for _ in range(rounds):
        random.shuffle(order)
        seconds = {name: cases[name]() for name in order}
        samples.append([seconds[name] / seconds["plain"] for name in ("fit", "loop")])
    fit, loop = (median(column) for column in zip(*samples, strict=True))
    return fit, loop


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each loop, and the median difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=MODELS, help="this one alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    random.seed(0)
    print(machine(), "heap kept" if keep_heap() else "heap not kept")
    rows, differences = [], []
    for name in [options.model] if options.model else MODELS:
        torch.manual_seed(0)
        model, batch = MODELS[name].make()
        for share in SHARES:
            asked = f"{share:.0%} of activations"
            cases, predicted = ways(model, batch, asked)
            fit, loop = slowdowns(cases, options.rounds)
            rows.append({"model": name, "asked": asked, "fit": fit, "loop": loop})
            differences.append(loop - fit)
            print(f"{name}, {asked}: fit {fit:.3f} ({predicted:.3f}), loop {loop:.3f}")
    found = median(differences)
    print(f"loop - fit, median of {len(rows)}: {found:+.3f} of a plain step")
    if not options.model:
        print(f"written to {save('loops', {'rows': rows, 'median': found}).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
