"""A Sequential of 64 layers four ways: its peak in bytes, beside the formula.

Every layer is `tanh(linear(x))` on a batch of S bytes. Autograd keeps one such tensor a
layer: the output, which is what tanh needs and what the next layer's linear needs. In
the backward of a layer two more are alive at the peak: the gradient between linear and
tanh, and the one on either side. So a chain of n layers needs, in units of S,

    plain                                                n + 2
    k segments of m = n / k layers, as regions           k + m + 1      least at k = √n
    halved recursively, n = 2^d, regions in regions      d + 3

(Chen et al. 2016, sections 4.1 and 4.3). The weights' gradients come on top; here they
are small, because the batch is large. What memory is saved is paid for by running
layers again; the table counts the runs.

    python examples/sequential.py [--quick]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import membudget as mb
from terminal import human

WIDTH = 32


class Layer(nn.Module):
    """A linear map and a tanh, which counts how often it runs."""

    runs = 0

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        Layer.runs += 1
        return torch.tanh(self.linear(x))


def halved(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Run the layers as two regions, each of which is halved again."""
    if len(layers) == 1:
        last: Tensor = mb.checkpoint(layers, x)
        return last
    middle = len(layers) // 2
    x = mb.checkpoint(halved, layers[:middle], x)
    return mb.checkpoint(halved, layers[middle:], x)


@dataclass(frozen=True)
class Way:
    """A way of running the layers, and the peak that the formula gives."""

    name: str
    run: Callable[[nn.Sequential, Tensor], Tensor]
    units: int


def ways(count: int) -> tuple[Way, ...]:
    """Return the ways of running so many layers, plain first."""
    root = math.isqrt(count)
    return (
        Way("plain", lambda layers, x: layers(x), count + 2),
        Way(
            "4 segments",
            lambda layers, x: mb.checkpoint_sequential(layers, 4, x),
            4 + count // 4 + 1,
        ),
        Way(
            "√n segments",
            lambda layers, x: mb.checkpoint_sequential(layers, "sqrt", x),
            root + count // root + 1,
        ),
        Way("halved recursively", halved, int(math.log2(count)) + 3),
    )


@dataclass(frozen=True)
class Outcome:
    """What one step needed and gave."""

    peak_bytes: int
    runs: int
    tensors: list[Tensor]


def step(way: Way, layers: nn.Sequential, x: Tensor) -> Outcome:
    """Run forward and backward, and return the peak with the output and gradients."""
    upstream = torch.ones_like(x)
    layers.zero_grad()
    Layer.runs = 0

    def forward_backward() -> Tensor:
        y = way.run(layers, x)
        y.backward(upstream)
        return y.detach()

    peak = mb.peak(forward_backward)
    gradients = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    return Outcome(peak.peak_bytes, Layer.runs, [peak.result, *gradients])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Returns:
        The exit code: 0 if every way gives the output and gradients of the plain one
        bit for bit, otherwise 1.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of it")
    count, rows = (16, 4096) if parser.parse_args(argv).quick else (64, 16384)

    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(count)))
    x = torch.randn(rows, WIDTH)
    console = Console()
    table = Table(title=f"{count} layers, S = {human(x.nbytes)}: the peak of a step")
    for head in ("", "formula", "is", "measured", "in S", "layer runs", "result"):
        table.add_column(head, justify="right" if head else "left")

    plain = step(ways(count)[0], layers, x)
    equal = True
    for way in ways(count):
        found = step(way, layers, x)
        pairs = zip(plain.tensors, found.tensors, strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
        equal &= same
        table.add_row(
            way.name,
            f"{way.units} S",
            human(way.units * x.nbytes),
            human(found.peak_bytes),
            f"{found.peak_bytes / x.nbytes:.2f}",
            str(found.runs),
            "equal" if same else "DIFFERENT",
        )
    console.print(table)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
