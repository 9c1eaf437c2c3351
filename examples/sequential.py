"""A chain of 64 equal layers: whole, in √n segments, and halved again and again.

What autograd must keep at once is counted exactly and stands beside its formula. With n
layers of s bytes: the plain chain keeps n tensors; k segments keep k inputs and, while
one is differentiated, its n/k tensors; halving to the end keeps one input a level.

    python examples/sequential.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import membudget as mb
from terminal import human

Layer = Callable[[Tensor], Tensor]


def halved(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Run the layers as two regions, each of which does the same with its half."""
    if len(layers) == 1:
        return layers[0](x)
    middle = len(layers) // 2
    x = mb.checkpoint(halved, layers[:middle], x)
    return mb.checkpoint(halved, layers[middle:], x)


def plain(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Run the layers one after the other."""
    for layer in layers:
        x = layer(x)
    return x


def segmented(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Run the layers in √n segments."""
    result: Tensor = mb.checkpoint_sequential(layers, "sqrt", x)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the peaks; return 1 if a gradient differs from the plain one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller tensors")
    size = 1 << (12 if parser.parse_args(arguments).quick else 20)
    count = 64
    layers: list[Layer] = [torch.sin] * count
    x = torch.linspace(-1, 1, size, requires_grad=True)
    ways = {
        "plain": (plain, "n + 1", count + 1),
        "√n segments": (segmented, "√n + √n", 8 + 8),
        "recursive halves": (halved, "log2(n) + 2", 6 + 2),
    }
    table = Table(title=f"{count} layers of {human(x.nbytes)} each")
    for head in ("", "peak of a step", "in tensors", "formula", "expected"):
        table.add_column(head, justify="right" if head else "left")
    gradients: list[Tensor] = []
    for name, (run, formula, expected) in ways.items():
        x.grad = None
        measured = mb.peak(lambda run=run: run(layers, x).sum().backward())
        assert x.grad is not None
        gradients.append(x.grad)
        tensors = f"{measured.peak_bytes / x.nbytes:.2f}"
        peak = human(measured.peak_bytes)
        table.add_row(name, peak, tensors, formula, str(expected))
    console = Console()
    console.print(table)
    equal = all(torch.equal(gradients[0], g) for g in gradients[1:])
    console.print("gradients equal bit for bit" if equal else "gradients DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
