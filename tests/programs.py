"""Straight-line programs on a small register file, with regions laid over them.

A program is a list of instructions; each reads registers that hold 4×4 tensors, and
writes one. A tree of regions lies over the list: each region covers a stretch of it. It
takes the registers that its stretch reads, in one of five ways, and returns those that
it wrote. Run with a caller that merely calls, the same program is the plain step.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import devices
from tests.zoo import Call, Case

# Calls `function(*args, **kwargs)`, as a region or not.
Caller = Callable[..., Any]
Passing = Literal["position", "keyword", "closure", "list", "dict"]
Registers = dict[int, Tensor]

INPUTS = 3  # The registers that hold leaves when the program begins.


class MovingMean(nn.Module):
    """Subtract a moving mean: a buffer that is changed in place or bound anew."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean) * x


class Machine(nn.Module):
    """What instructions use besides registers: parameters, buffers, a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.moving = MovingMean(in_place=True)
        self.rebound = MovingMean(in_place=False)
        self.scale = nn.Parameter(torch.rand(4))
        self.generator = devices.generator().manual_seed(5)


@dataclass(frozen=True, repr=False)
class Operator:
    """One kind of instruction.

    Attributes:
        name: Its name.
        operands: How many registers it reads.
        run: Computes the result from the machine and the operands.
        in_place: Whether it writes into its first operand, which is its result.
        is_view: Whether its result shares the storage of its first operand.
        saves: What autograd may keep, and so must not be written into: operands
            (`"in"`), the result (`"out"`) or both.
    """

    name: str
    operands: int
    run: Callable[..., Tensor]
    in_place: bool = False
    is_view: bool = False
    saves: Literal["", "in", "out", "in out"] = "in out"

    def __repr__(self) -> str:
        """Return the name, so that a failing program can be read."""
        return self.name

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.name)


def _coin(m: Machine, a: Tensor) -> Tensor:
    return m.linear(a).tanh() if random.random() < 0.5 else (a * a).sin()


def _numpy(m: Machine, a: Tensor) -> Tensor:
    return (a * float(np.random.standard_normal())).cos()  # noqa: NPY002


def _own_generator(m: Machine, a: Tensor) -> Tensor:
    return a * torch.rand(4, 4, generator=m.generator)


def _teacher(m: Machine, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.linear(a).softmax(-1)
    return target * b.sigmoid()


def _halves_scaled(m: Machine, a: Tensor, b: Tensor) -> Tensor:
    a[:2].mul_(0.5)
    a[2:].add_(b[:2])
    return a


def _folded(m: Machine, a: Tensor) -> Tensor:
    upper, lower = a.reshape(2, 8).unbind()
    return (upper * lower).repeat(2).view(4, 4)


def _ordered(m: Machine, a: Tensor) -> Tensor:
    return a.sort(-1).values * a.topk(4, 0).values


OPERATORS = (
    Operator("add", 2, lambda m, a, b: a + 0.5 * b, saves=""),
    Operator("mul", 2, lambda m, a, b: a * b, saves="in"),
    Operator("matmul", 2, lambda m, a, b: (a @ b) / 4, saves="in"),
    Operator("sin", 1, lambda m, a: a.sin(), saves="in"),
    Operator("tanh", 1, lambda m, a: a.tanh(), saves="out"),
    Operator("exp", 1, lambda m, a: (-a.abs()).exp()),
    Operator("linear", 1, lambda m, a: m.linear(a), saves="in"),
    Operator("scale", 1, lambda m, a: F.gelu(a * m.scale), saves="in"),
    Operator("norm", 1, lambda m, a: m.norm(a), saves="in"),
    Operator("moving mean", 1, lambda m, a: m.moving(a), saves="in"),
    Operator("rebound mean", 1, lambda m, a: m.rebound(a), saves="in"),
    Operator("softmax", 1, lambda m, a: a.softmax(-1), saves="out"),
    Operator("centre", 1, lambda m, a: a - a.mean(0, keepdim=True), saves=""),
    Operator("spread", 1, lambda m, a: a.logsumexp(0).expand(4, 4) * a),
    Operator("cat", 2, lambda m, a, b: torch.cat([a[:2], b[2:]]), saves=""),
    Operator("split", 1, _folded, saves="in"),
    Operator("sort", 1, _ordered),
    Operator("transpose", 1, lambda m, a: a.t(), is_view=True, saves=""),
    Operator("view", 1, lambda m, a: a[:, :], is_view=True, saves=""),
    Operator("detach", 2, lambda m, a, b: a.detach() * b, saves="in"),
    Operator("teacher", 2, _teacher),
    Operator("dropout", 1, lambda m, a: F.dropout(a, 0.4), saves="in"),
    Operator("noise", 1, lambda m, a: a * torch.rand_like(a) + torch.randn(4)),
    Operator("coin", 1, _coin),
    Operator("numpy", 1, _numpy, saves="in"),
    Operator("own generator", 1, _own_generator, saves="in"),
    Operator("add_", 2, lambda m, a, b: a.add_(b, alpha=0.25), True, saves=""),
    Operator("mul_", 1, lambda m, a: a.mul_(0.75), True, saves=""),
    Operator("relu_", 1, lambda m, a: a.relu_(), True, saves="out"),
    Operator("sin_", 1, lambda m, a: a.sin_(), True, saves=""),
    Operator("dropout_", 1, lambda m, a: F.dropout(a, 0.4, inplace=True), True),
    Operator("slices_", 2, _halves_scaled, True, saves=""),
)


@dataclass(frozen=True, repr=False)
class Instruction:
    """`registers[target] = operator(*registers[operands])`."""

    operator: Operator
    operands: tuple[int, ...]
    target: int

    def __repr__(self) -> str:
        """Return it as a line of a program."""
        return f"r{self.target} = {self.operator.name} {self.operands}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Region:
    """A stretch of the program that runs as one region.

    Attributes:
        body: Instructions and inner regions, in order.
        reads: The registers that it takes.
        writes: The registers that it returns.
        passing: How it takes them.
    """

    body: tuple[Instruction | Region, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    passing: Passing


@dataclass(frozen=True)
class Program:
    """A whole program.

    Attributes:
        body: Instructions and regions, in order.
        trainable: Whether each input requires a gradient.
        results: The registers that enter the loss.
    """

    body: tuple[Instruction | Region, ...]
    trainable: tuple[bool, ...]
    results: tuple[int, ...]


def run_program(
    program: Program, machine: Machine, leaves: tuple[Tensor, ...], caller: Caller
) -> list[Tensor]:
    """Run a program and return its results.

    Args:
        program: The program.
        machine: Its parameters, buffers and private generator.
        leaves: What the first registers hold.
        caller: Runs each region: `mb.checkpoint`, or a function that merely calls.
    """
    registers = run_body(program.body, machine, caller, dict(enumerate(leaves)))
    return [registers[i] for i in program.results]


def run_body(
    body: tuple[Instruction | Region, ...],
    machine: Machine,
    caller: Caller,
    before: Mapping[int, Tensor],
) -> Registers:
    """Run a stretch and return the registers after it."""
    registers = dict(before)
    for node in body:
        if isinstance(node, Region):
            registers |= _run_region(node, machine, caller, registers)
        else:
            operands = [registers[i] for i in node.operands]
            registers[node.target] = node.operator.run(machine, *operands)
    return registers


def _run_region(
    region: Region, machine: Machine, caller: Caller, registers: Registers
) -> Registers:
    taken = [registers[i] for i in region.reads]
    stretch = functools.partial(_run_stretch, region, machine, caller)
    match region.passing:
        case "position":
            written = caller(lambda *given: stretch(given), *taken)
        case "keyword":
            named = {f"r{i}": tensor for i, tensor in enumerate(taken)}
            written = caller(lambda **given: stretch(list(given.values())), **named)
        case "closure":
            written = caller(lambda: stretch(taken))
        case "list":
            written = caller(stretch, taken)
        case "dict":
            nested = {"inner": {str(i): (tensor,) for i, tensor in enumerate(taken)}}
            written = caller(
                lambda given: stretch([t for (t,) in given["inner"].values()]), nested
            )
    return dict(zip(region.writes, written, strict=True))


def _run_stretch(
    region: Region, machine: Machine, caller: Caller, given: Any
) -> list[Tensor]:
    before = dict(zip(region.reads, given, strict=True))
    after = run_body(region.body, machine, caller, before)
    return [after[i] for i in region.writes]


def merely_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function without a region."""
    return function(*args, **kwargs)


def case_of(program: Program) -> Case:
    """Return a case that runs `program`; its function takes the caller of regions."""

    def make() -> Call:
        machine = Machine()
        leaves = tuple(
            torch.randn(4, 4).requires_grad_(program.trainable[i])
            for i in range(INPUTS)
        )
        return Call(
            functools.partial(run_program, program, machine, leaves),
            state={
                "machine": machine,
                "leaves": leaves,
                "generator": machine.generator,
            },
            # With the leaves in it, there is always something to differentiate.
            used=lambda results: [*results, *leaves],
        )

    return Case("random program", make)
