"""A loop of changing lengths under a budget: what a new length costs, and saves.

A GPT of six blocks is trained on random lengths within 60 % of the bytes of
the longest. For lengths between known ones: the CPU time of choosing a plan, and of the
first step ÷ the later ones, which verify nothing. Then 200 random lengths, each under
the plan of its length, ÷ the same under one plan, that of the longest, both verifying
a sample of the lengths.

    python3 run.py bench lengths [--lengths 40]
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import models
import torch
from harness import machine
from torch import Tensor, nn

import membudget as mb
from membudget.loop.root import Root

LONGEST, SHORTEST = 128, 16
SHARE = 0.6

Way = Callable[[Sequence[int]], list[float]]


def made() -> nn.Module:
    """Return the model; it computes its loss."""
    gpt = models.gpt(blocks=6, width=128, heads=4, batch=8, length=LONGEST)
    return gpt[0]


def batch(length: int) -> tuple[Tensor, Tensor]:
    """Return words and the next words."""
    tokens = torch.randint(256, (8, length))
    return tokens, tokens.roll(-1, 1)


def step(model: nn.Module, length: int) -> float:
    """Run one step; return its CPU seconds."""
    start_s = time.process_time()
    model(*batch(length)).backward()
    model.zero_grad()
    return time.process_time() - start_s


def planning_noted(seconds: list[float]) -> Any:
    """Return a context in which the CPU seconds of planning each call are noted."""
    real = Root._before

    def timed(*args: Any) -> Any:
        start_s = time.process_time()
        found = real(*args)
        seconds.append(time.process_time() - start_s)
        return found

    return patch.object(Root, "_before", lambda *args: timed(*args))


def warmed(model: nn.Module) -> None:
    """Meet the longest and the shortest, twice."""
    for length in (LONGEST, SHORTEST) * 3:
        step(model, length)


def limit_of(model: nn.Module) -> int:
    """Return a share of what a plain step of the longest length takes."""
    taken = mb.peak(lambda: step(model, LONGEST)).peak_bytes
    model.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    return parameters + int(SHARE * taken)


def new_lengths(count: int) -> tuple[list[float], list[float]]:
    """Return planning seconds, and first ÷ later steps, of new lengths."""
    model = made()
    noted_s: list[float] = []
    planning_s, ratios = [], []
    limit = limit_of(model)
    with planning_noted(noted_s), mb.budget(model, limit):
        warmed(model)
        lengths = random.sample(range(SHORTEST + 1, LONGEST), count)
        for length in lengths:
            first_s = step(model, length) - noted_s[-1]
            planning_s.append(noted_s[-1])
            ratios.append(first_s / min(step(model, length) for _ in range(2)))
    return planning_s, ratios


def random_lengths() -> float:
    """Return the seconds of 200 random lengths ÷ those under the longest one's plan.

    Each way runs twice, there and back, with a new model; of the two times of a length
    the smaller counts, because other load only adds to it.
    """
    lengths = [random.randint(SHORTEST, LONGEST) for _ in range(200)]
    own, one = under_own_plans, under_one_plan
    times: dict[Way, list[list[float]]] = {own: [], one: []}
    for way in (own, one, one, own):
        gc.collect()  # What is alive counts.
        times[way].append(way(lengths))
    own_s, one_s = (sum(map(min, *times[way])) for way in (own, one))
    return float(own_s / one_s)


def under_own_plans(lengths: Sequence[int]) -> list[float]:
    """Return the seconds of steps that a budget plans for."""
    model = made()
    with mb.budget(model, limit_of(model)):
        warmed(model)
        return [step(model, length) for length in lengths]


def under_one_plan(lengths: Sequence[int]) -> list[float]:
    """Return the seconds of steps under the plan of the longest one."""
    model = made()
    fitted = mb.fit(model, batch(LONGEST), limit_of(model), measure="none")
    fitted.remove()
    mb.apply(model, fitted.plan, verify=0.01)
    warmed(model)
    return [step(model, length) for length in lengths]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, default=40, help="new lengths to time")
    count = parser.parse_args(arguments).lengths
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    planning_s, ratios = new_lengths(count)
    print(machine())
    slowest_s = quantiles(planning_s, n=20)[-1]
    print(
        f"planning a new length: {1000 * median(planning_s):.1f} ms, "
        f"p95 {1000 * slowest_s:.1f} ms"
    )
    print(f"its first step ÷ later ones: {median(ratios):.2f}, worst {max(ratios):.2f}")
    print(f"200 random lengths ÷ the longest one's plan: {random_lengths():.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
