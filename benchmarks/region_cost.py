"""What a region costs: once, and for each tensor that autograd saves in it.

A chain of `sin` on a 4x4 tensor saves one tensor an operator and computes next to
nothing, so its time over the plain chain is the region's own. Two lengths give a line:
its slope is the cost of a saved tensor, its value at one operator minus one slope the
fixed cost. Of modules, which a region inspects, it is the cost of one operator's region
that is compared. Regions use the extension in C++, which is built first, unless
`MEMBUDGET_NATIVE` is 0 or there is no compiler.

    python3 run.py bench region_cost [--seconds 60]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from harness import Case, Estimate, in_turns, machine, save, show
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb
from membudget.engine import native

Chain = Callable[[Tensor], Tensor]

LENGTHS = (1, 21)
# What is timed is a region that is known: its first calls are verified, and cost what
# "verified" says. Nobody goes backward from those of the forward alone, and that is
# known after 256 calls of a path.
CALLS_BEFORE = 600
BASE = "torch"
# The bounds that this project set itself, as fractions of torch's cost: once, and for a
# saved tensor; with the extension, and without it.
BOUNDS = {
    True: {"membudget, guards=False": (0.15, 0.25), "membudget": (0.3, 0.25)},
    False: {"membudget, guards=False": (0.28, 0.42), "membudget": (0.45, 0.45)},
}


class _Stop(BaseException):
    """Ends a second run once all is back."""


def hooks_alone(function: Chain) -> Chain:
    """Return a region of saved-tensor hooks that guards nothing: what any rerun takes.

    It stops as soon as all tensors are back, by an exception, which C++ carries through
    the operator that saves the last one.
    """

    def region(x: Tensor) -> Tensor:
        dropped: list[None] = []
        found: list[Tensor] = []

        def drop(_: Tensor) -> int:
            dropped.append(None)
            return len(dropped) - 1

        def fill(tensor: Tensor) -> None:
            found.append(tensor)
            if len(found) == len(dropped):
                raise _Stop

        def give(index: int) -> Tensor:
            if not found:
                given = x.detach().requires_grad_()
                hooks = saved_tensors_hooks(fill, _as_it_is)
                with suppress(_Stop), torch.enable_grad(), hooks:
                    function(given)
            return found[index]

        with saved_tensors_hooks(drop, give):
            return function(x)

    return region


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def ways() -> dict[str, Callable[[Chain], Chain]]:
    """Return the ways of making a region of a function, the plain one first."""

    def of_torch(use_reentrant: bool) -> Callable[[Chain], Chain]:
        return lambda function: partial(
            torch_checkpoint, function, use_reentrant=use_reentrant
        )

    return {
        "plain": lambda function: function,
        BASE: of_torch(False),
        "torch, reentrant": of_torch(True),
        "hooks alone": hooks_alone,
        "membudget": mb.checkpoint(),
        "membudget, guards=False": mb.checkpoint(guards=False),
        "membudget, verify=False": mb.checkpoint(verify=False),
        "membudget, verified": mb.checkpoint(determinism_check="values"),
        "membudget, reentrant": mb.checkpoint(use_reentrant=True),
    }


def chain(length: int) -> Chain:
    """Return a function of `length` operators."""

    def function(x: Tensor) -> Tensor:
        for _ in range(length):
            x = x.sin()
        return x

    return function


class Sine(nn.Module):
    """Computes as little as a chain of one operator, whatever modules it has."""

    def __init__(self, *parts: nn.Module) -> None:
        """Hold some parts."""
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Run one operator."""
        return x.sin()


def modules() -> dict[str, Chain]:
    """Return a module without parts, and one that has about those of a block."""
    parts = [*(nn.Linear(1, 1) for _ in range(8)), nn.GELU(), nn.Dropout(0.0)]
    return {"empty": Sine(), "11 submodules, 16 parameters": Sine(*parts)}


def chains() -> dict[str, Chain]:
    """Return the chain of each length."""
    return {str(length): chain(length) for length in LENGTHS}


def cases(of: dict[str, Chain], backward: bool) -> dict[str, Case]:
    """Return every way with every function."""
    x = torch.randn(4, 4, requires_grad=True)
    gradient = torch.ones(4, 4)

    def case_of(region: Chain) -> Case:
        if backward:
            return lambda: torch.autograd.backward(region(x), gradient)
        return lambda: region(x)

    found = {
        f"{name}/{what}": case_of(make_region(function))
        for name, make_region in ways().items()
        for what, function in of.items()
    }
    for case in found.values():
        for _ in range(CALLS_BEFORE):
            case()
    return found


def costs(estimates: dict[str, Estimate]) -> dict[str, tuple[Estimate, Estimate]]:
    """Return the fixed cost and the cost of a saved tensor of each way, over plain."""
    short, long = LENGTHS
    found = {}
    for name in ways():
        if name == "plain":
            continue
        first, last = (
            estimates[f"{name}/{n}"] - estimates[f"plain/{n}"] for n in LENGTHS
        )
        slope = (last - first) * (1 / (long - short))
        found[name] = (first - slope * short, slope)
    return found


def table(title: str, found: dict[str, tuple[Estimate, Estimate]]) -> Table:
    """Return costs in microseconds and as fractions of torch's, median (quartile)."""
    result = Table(title=title)
    for head in ("", "fixed µs", "÷ torch", "saved tensor µs", "÷ torch"):
        result.add_column(head, justify="right" if head else "left")
    for name, both in found.items():
        cells = []
        for estimate, base in zip(both, found[BASE], strict=True):
            ratio, quartile = estimate.ratio(base)
            cells += [f"{estimate.median_us:.1f}", f"{ratio:.2f} ({quartile:.2f})"]
        result.add_row(name, *cells)
    return result


def module_costs(estimates: dict[str, Estimate]) -> dict[str, dict[str, float]]:
    """Return what a region of each module costs, as a fraction of torch's."""

    def over_plain(name: str, what: str) -> Estimate:
        return estimates[f"{name}/{what}"] - estimates[f"plain/{what}"]

    return {
        name: {
            what: over_plain(name, what).ratio(over_plain(BASE, what))[0]
            for what in modules()
        }
        for name in ways()
        if name != "plain"
    }


def module_table(found: dict[str, dict[str, float]]) -> Table:
    """Return these costs as a table."""
    result = Table(title="regions of modules, forward and backward, ÷ torch's")
    for head in ("", *modules()):
        result.add_column(head, justify="right" if head else "left")
    for name, ratios in found.items():
        result.add_row(name, *(f"{ratio:.2f}" for ratio in ratios.values()))
    return result


def verdicts(
    found: dict[str, tuple[Estimate, Estimate]], has_extension: bool
) -> list[str]:
    """Say of each bound whether it was met; nothing is asserted, times are noisy."""
    lines = []
    for name, bounds in BOUNDS[has_extension].items():
        pairs = zip(found[name], found[BASE], strict=True)
        ratios = [estimate.ratio(base)[0] for estimate, base in pairs]
        parts = zip(("fixed", "saved tensor"), ratios, bounds, strict=True)
        for what, ratio, bound in parts:
            met = "met" if ratio <= bound else "NOT met"
            lines.append(f"{name}, {what}: {ratio:.2f} of torch, bound {bound}: {met}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args(arguments).seconds / 3
    torch.set_num_threads(1)
    console = Console()
    has_extension = native.is_wanted() and native.extension() is not None
    where = machine() | {"regions in": "C++" if has_extension else "Python"}
    console.print(", ".join(f"{key} {value}" for key, value in where.items()))
    results: dict[str, Any] = {"has_extension": has_extension}
    for title, backward in (("forward", False), ("forward and backward", True)):
        estimates, rounds = in_turns(cases(chains(), backward), seconds=seconds)
        found = costs(estimates)
        show(console, table(f"{title}, {rounds} rounds, median (quartile)", found))
        results[title] = {
            name: {
                "fixed_us": fixed.median_us,
                "saved_tensor_us": slope.median_us,
                "fixed_of_torch": fixed.ratio(found[BASE][0])[0],
                "saved_tensor_of_torch": slope.ratio(found[BASE][1])[0],
            }
            for name, (fixed, slope) in found.items()
        }
    results["verdicts"] = verdicts(found, has_extension)
    estimates, _ = in_turns(cases(modules(), backward=True), seconds=seconds)
    results["modules"] = module_costs(estimates)
    console.print(module_table(results["modules"]))
    for line in results["verdicts"]:
        console.print(line)
    path = save("region_cost", results)
    console.print(f"written to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
