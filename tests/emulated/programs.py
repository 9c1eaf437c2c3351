"""Random programs over streams and devices, with the waits that they need, no more.

A program is a chain of parts. Each part is one region, called on a stream that is
drawn, as are those of its operators, on one of two devices. A reader waits for the
stream that made what it reads, and names itself to the allocator; before a part
returns, its stream waits for all others. Nobody else waits for anything, so what a
region adds must wait by itself, wherever the backward pass, or a recompute ahead of it,
begins.

Autograd has a thread for each device, and adds up the gradients of a tensor as they
arrive. Of three, the order decides the last bit. So a program that moves tensors
between devices reads each of them, and each layer, at most twice.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import membudget as mb
from tests.emulated.world import (
    BINARY,
    DEVICES,
    HOOKS,
    LAYERS,
    MOVE,
    SHAPE,
    STREAMS,
    UNARY,
    WRITE,
    Made,
    Place,
    World,
    apply,
)

Region = Callable[..., Any]


@dataclass(frozen=True)
class Line:
    """An operator, what it reads by number, and where it runs."""

    operator: str
    operands: tuple[int, ...]
    place: Place

    @property
    def device(self) -> int:
        """The device of what it makes."""
        return (self.place.device + (self.operator == MOVE)) % DEVICES


@dataclass(frozen=True)
class Part:
    """What runs as one region.

    Attributes:
        lines: What it runs; operand 0 is its argument, the last makes its result.
        place: Where it is called.
        casts: Whether it runs under autocast.
    """

    lines: tuple[Line, ...]
    place: Place
    casts: bool


@dataclass(frozen=True)
class Program:
    """A step.

    Attributes:
        seed: What it is drawn from.
        parts: The regions, each of which takes the result of the one before.
        hooks: The saved-tensor hooks around all of them.
        ahead: Where regions are recomputed before the backward pass, if they are.
        backward: Where the backward pass begins.
    """

    seed: int
    parts: tuple[Part, ...]
    hooks: str
    ahead: Place | None
    backward: Place

    @property
    def operators(self) -> set[str]:
        """The operators that it runs."""
        return {line.operator for part in self.parts for line in part.lines}


class Reads:
    """How often tensors of a part, and layers of a program, are read.

    Attributes:
        moves: Whether the program moves tensors between devices.
    """

    def __init__(self, moves: bool) -> None:
        self.moves = moves
        self._most = 2 if moves else math.inf
        self._of_layers: Counter[tuple[str, int]] = Counter()
        self._of_tensors: Counter[int] = Counter()

    def begin_part(self) -> None:
        self._of_tensors.clear()

    def may(self, tensor: int) -> bool:
        return self._of_tensors[tensor] < self._most

    def note(self, tensors: Sequence[int]) -> None:
        self._of_tensors.update(tensors)

    def unary(self, rng: random.Random, device: int) -> str:
        """Draw an operator for a device."""
        worn = [
            layer
            for (layer, of), count in self._of_layers.items()
            if of == device and count >= self._most
        ]
        offered = [*UNARY, MOVE] if self.moves else list(UNARY)
        operator = rng.choice([name for name in offered if name not in worn])
        if operator in LAYERS:
            self._of_layers[operator, device] += 1
        return operator


def draw(seed: int) -> Program:
    """Draw the program of a seed."""
    rng = random.Random(seed)
    hooks = rng.choice(["none", "none", *HOOKS])
    reads = Reads(moves=rng.random() < 0.5)
    parts: list[Part] = []
    device = 0
    for _ in range(rng.randint(1, 3)):
        parts.append(_part(rng, device, reads))
        device = parts[-1].lines[-1].device
    ahead = _place(rng, rng.randrange(DEVICES)) if rng.random() < 0.3 else None
    return Program(seed, tuple(parts), hooks, ahead, _place(rng, device))


def _place(rng: random.Random, device: int) -> Place:
    return Place(device, rng.randrange(STREAMS))


def _part(rng: random.Random, device: int, reads: Reads) -> Part:
    called, lines, on = _place(rng, device), [], [device]
    reads.begin_part()
    for _ in range(rng.randint(2, 8)):
        recent = [i for i in range(max(0, len(on) - 4), len(on)) if reads.may(i)]
        operand = rng.choice(recent)
        others = [i for i in recent if on[i] == on[operand] and i != operand]
        if others and rng.random() < 0.4:
            operator, operands = rng.choice(list(BINARY)), [operand, rng.choice(others)]
        else:
            operator, operands = reads.unary(rng, on[operand]), [operand]
        reads.note(operands)
        lines.append(Line(operator, tuple(operands), _place(rng, on[operand])))
        on.append(lines[-1].device)
    lines += _sums(rng, on, reads)
    return Part(tuple(_with_writes(rng, lines)), called, rng.random() < 0.2)


def _sums(rng: random.Random, on: list[int], reads: Reads) -> Iterator[Line]:
    """Yield sums on one stream of what several have made, on the device of the last.

    They save nothing: gradients reach those streams before anybody has recomputed.
    """
    place, last = _place(rng, on[-1]), len(on) - 1
    for i, device in enumerate(on[:last]):
        if device == on[last] and reads.may(i) and rng.random() < 0.5:
            yield Line("add", (i, last), place)
            last = len(on)
            on.append(place.device)


def _with_writes(rng: random.Random, lines: list[Line]) -> Iterator[Line]:
    """Yield the lines, some of which overwrite what nobody has saved or reads again."""
    for number, line in enumerate(lines):
        (operand, *others), made = line.operands, lines[: line.operands[0]]
        reads = [other for other in lines if operand in other.operands]
        is_last = reads[-1] is line and not others and line.operator != MOVE
        saves_nothing = all(read.operator == "add" for read in reads[:-1])
        is_saved = not made or made[-1].operator in ("tanh", WRITE)
        if is_last and saves_nothing and not is_saved and number < len(lines) - 1:
            line = replace(line, operator=WRITE) if rng.random() < 0.5 else line
        yield line


def _run_part(world: World, part: Part, argument: Tensor) -> Tensor:
    made = [Made(argument, part.place)]
    # No stream waits for a cast of a parameter that another has cached.
    with torch.autocast("emu", torch.bfloat16, part.casts, cache_enabled=False):
        for line in part.lines:
            operands = [world.read(made[i], line.place) for i in line.operands]
            if line.operator == WRITE:
                _wait_for_readers(world, line, part)
            made.append(Made(*apply(world, line.operator, operands, line.place)))
    return [world.read(one, part.place) for one in made][-1]


def _wait_for_readers(world: World, writer: Line, part: Part) -> None:
    for line in part.lines:
        if writer.operands[0] in line.operands:
            world.stream(writer.place).wait_stream(world.stream(line.place))


def _without_region(function: Callable[[Tensor], Tensor], argument: Tensor) -> Tensor:
    return function(argument)


def _forward(world: World, program: Program, x: Tensor, region: Region) -> Made:
    """Run each part as a region, on the stream where it is called."""
    made = Made(x, Place(0, 0))
    with HOOKS[program.hooks]():
        for part in program.parts:
            argument = world.read(made, part.place)
            with world.on(part.place):
                result = region(partial(_run_part, world, part), argument)
            made = Made(result, part.place)
    return made


def plain(program: Program) -> dict[str, Tensor]:
    """Return what the program computes without any region or hook."""
    return run(replace(program, hooks="none"), None)


def run(program: Program, region: Region | None) -> dict[str, Tensor]:
    """Run the program from its seed; return what it computed and changed."""
    torch.manual_seed(program.seed)
    world = World()
    x = torch.randn(SHAPE, device="emu").requires_grad_()
    ahead = program.ahead
    collects = region is not None and ahead is not None
    with mb.collect_regions() if collects else nullcontext() as regions:
        made = _forward(world, program, x, region or _without_region)
    with world.on(program.backward):
        loss = world.read(made, program.backward).float().square().mean()
        torch.rand((), device="emu")
    seen: dict[str, Tensor] = {}
    if ahead is not None:
        world.read(made, ahead)
        with world.on(ahead):
            if regions is not None:
                regions.recompute()
            seen = _copies(world, ahead.device, "ahead")
    with world.on(program.backward):
        loss.backward()
        seen |= _copies(world, program.backward.device, "then")
    return _facts(world, x, loss) | {name: copy.cpu() for name, copy in seen.items()}


def _copies(world: World, device: int, when: str) -> dict[str, Tensor]:
    """Return copies of a device's buffers, on the current stream.

    Without a wait: that stream has waited for the forward, which wrote them.
    """
    place = torch.device("emu", device)
    buffers = [(n, b) for n, b in world.named_buffers() if b.device == place]
    return {f"{name} {when}": buffer.clone() for name, buffer in buffers}


def _facts(world: World, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    for device in range(DEVICES):
        torch.accelerator.synchronize(device)
    facts = {"loss": loss, "x.grad": x.grad}
    facts |= {f"{name}.grad": p.grad for name, p in world.named_parameters()}
    facts |= dict(world.named_buffers())
    generators = {"cpu": torch.default_generator}
    for i, own in enumerate(world.generators):
        generators[f"emu:{i}"] = torch.get_device_module("emu").default_generators[i]
        generators[f"own {i}"] = own
    states = {f"state of {name}": g.get_state() for name, g in generators.items()}
    found = {n: t.detach().cpu() for n, t in facts.items() if t is not None}
    return found | states
