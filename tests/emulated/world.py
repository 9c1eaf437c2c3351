"""What random programs use: streams of two devices, layers, generators, operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import membudget as mb

DEVICES, STREAMS = 2, 3
SHAPE = (4, 8)


@dataclass(frozen=True)
class Place:
    """A stream of a device."""

    device: int
    stream: int


@dataclass(frozen=True)
class Made:
    """A tensor, and the stream on which it is ready."""

    tensor: Tensor
    place: Place


class World(nn.Module):
    """Layers, generators and streams of each device."""

    def __init__(self) -> None:
        super().__init__()
        devices = [torch.device("emu", i) for i in range(DEVICES)]
        make = partial(nn.Linear, SHAPE[1], SHAPE[1])
        self.layers = nn.ModuleList(make().to(device) for device in devices)
        self.norms = nn.ModuleList(nn.BatchNorm1d(SHAPE[1]).to(d) for d in devices)
        self.generators = [torch.Generator(d).manual_seed(5) for d in devices]
        self.streams = [
            [torch.accelerator.current_stream(d)]
            + [torch.Stream(d) for _ in range(STREAMS - 1)]
            for d in devices
        ]
        # What was made above may be used everywhere.
        for device in devices:
            torch.accelerator.synchronize(device)

    def stream(self, place: Place) -> torch.Stream:
        """Return the stream at a place."""
        return self.streams[place.device][place.stream]

    @contextmanager
    def on(self, place: Place) -> Iterator[None]:
        """Work on a stream, which must be the current one to the end.

        Not `with stream`, because one stream cannot be entered twice at a time.
        """
        stream, left = self.stream(place), torch.accelerator.current_stream()
        of_device = torch.accelerator.current_stream(place.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
            assert torch.accelerator.current_stream() == stream
        finally:
            torch.accelerator.set_stream(of_device)
            torch.accelerator.set_stream(left)

    def read(self, made: Made, place: Place) -> Tensor:
        """Return a tensor for work that is launched at `place` next."""
        if made.place != place:
            stream = self.stream(place)
            stream.wait_stream(self.stream(made.place))
            if made.tensor.device == stream.device:
                made.tensor.record_stream(stream)
        return made.tensor


Operator = Callable[[World, int, Tensor], Tensor]


def _noise(world: World, device: int, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, device=x.device, generator=world.generators[device])


def _written(world: World, device: int, x: Tensor) -> Tensor:
    y = x * 1.5
    return y.mul_(x.detach().cos()).sin()


def _counted(world: World, device: int, x: Tensor) -> Tensor:
    # Whoever has updated the running statistics before.
    for stream in world.streams[device]:
        torch.accelerator.current_stream().wait_stream(stream)
    y: Tensor = world.norms[device](x)
    return y


def _abroad(world: World, device: int, x: Tensor) -> Tensor:
    # The other device is the current one, as where nobody has set it.
    with torch.get_device_module("emu").device(1 - device):
        return F.dropout(x.sin(), 0.3) * torch.rand_like(x)


UNARY: dict[str, Operator] = {
    "sin": lambda world, device, x: x.sin(),
    "tanh": lambda world, device, x: x.tanh(),
    "cube": lambda world, device, x: x.cos() ** 3,
    "gelu": lambda world, device, x: F.gelu(x),
    "linear": lambda world, device, x: world.layers[device](x),
    "norm": lambda world, device, x: F.layer_norm(x, SHAPE[1:]),
    "dropout": lambda world, device, x: F.dropout(x, 0.3),
    "drawn": lambda world, device, x: x * torch.rand_like(x),
    # The device is the current one.
    "made": lambda world, device, x: x * torch.rand(SHAPE, device="emu"),
    "noise": _noise,
    "abroad": _abroad,
    "counted": _counted,
    "written": _written,
    "chosen": lambda world, device, x: x.sin() if x.sum().item() > 0 else x.cos(),
}

LAYERS = ("linear", "counted")

# None gives one gradient to two tensors: autograd would add to it in place on a stream
# while another still reads it, with no region around.
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x * 0.75 + y * 1.5,
    "mul": lambda x, y: x * y.tanh(),
    "sub": lambda x, y: x.sin() * 0.5 - y * 1.25,
}

MOVE = "move"  # To the other device.
WRITE = "write"  # In place.

HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "cloned": lambda: saved_tensors_hooks(torch.clone, torch.clone),
    "offloaded": lambda: save_on_cpu(pin_memory=True, device_type="emu"),
    "moved": lambda: mb.offload("64KiB", window=256, smallest=1),
}


def apply(
    world: World, operator: str, operands: list[Tensor], place: Place
) -> tuple[Tensor, Place]:
    """Run an operator at a place; return its result, and where that is ready."""
    if operator == MOVE:
        # A copy between devices waits for the current streams of both.
        other = Place(1 - place.device, 0)
        with world.on(other), world.on(place):
            return operands[0].to(torch.device("emu", other.device)), other
    with world.on(place):
        if operator == WRITE:
            return operands[0].mul_(0.5), place
        if operator in BINARY:
            return BINARY[operator](*operands), place
        return UNARY[operator](world, place.device, *operands), place
