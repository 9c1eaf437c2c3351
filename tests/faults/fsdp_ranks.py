"""One rank of row 21: regions on blocks that `fully_shard` has sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from tests.faults.implementations import Checkpoint, ours, plain, torch_rerun
from tests.faults.ranks import WORLD_SIZE, report_rank

BLOCKS = 4
STEPS = 2


class Block(nn.Module):
    """A feed-forward layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.1)
        return x + self.down(hidden)


class Model(nn.Module):
    """Four blocks, each called through `checkpoint`."""

    def __init__(self, checkpoint: Checkpoint = plain) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoint = checkpoint
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return x


def shard(model: Model, reshard: bool) -> Model:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return model


def sharded(checkpoint: Checkpoint, reshard: bool) -> Model:
    """Regions whose function is the call of a sharded block, with FSDP's hooks."""
    return shard(Model(checkpoint), reshard)


def regions_outside(reshard: bool) -> Model:
    model = shard(Model(), reshard)
    mb.apply(model, blocks=Block)
    return model


def regions_inside(reshard: bool) -> Model:
    model = Model()
    mb.apply(model, blocks=Block)
    return shard(model, reshard)


MODELS: dict[str, Callable[[bool], Model]] = {
    "plain": lambda reshard: sharded(plain, reshard),
    "torch": lambda reshard: sharded(torch_rerun, reshard),
    "checkpoint of a sharded block": lambda reshard: sharded(ours, reshard),
    "sharded, then applied": regions_outside,
    "applied, then sharded": regions_inside,
}


class AllGathers(TorchDispatchMode):
    """Count the all-gathers that run inside, of whichever kind."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        self.count += namespace == "c10d" and "allgather" in name
        return func(*args, **kwargs or {})


def train(model: Model, rank: int) -> tuple[int, list[list[float]]]:
    """Train; return the all-gathers of the last step and this rank's gradients."""
    torch.manual_seed(rank)
    for _ in range(STEPS):
        model.zero_grad()
        with AllGathers() as gathers:
            model(torch.randn(3, 8)).square().sum().backward()
    return gathers.count, [local_gradient(p) for p in model.parameters()]


def local_gradient(parameter: Any) -> list[float]:
    # A float keeps all the bits of a float32, and JSON those of a float.
    values: list[float] = parameter.grad.to_local().flatten().tolist()
    return values


def count_and_gradients(
    make_model: Callable[[bool], Model], reshard: bool, rank: int
) -> tuple[int, Any]:
    """Train one model; an error is reported in place of its gradients."""
    try:
        return train(make_model(reshard), rank)
    except Exception as error:
        return -1, repr(error)


def all_reports(rank: int) -> dict[str, tuple[int, Any]]:
    return {
        f"{name}, reshard={reshard}": count_and_gradients(make_model, reshard, rank)
        for reshard in (True, False)
        for name, make_model in MODELS.items()
    }


if __name__ == "__main__":
    report_rank(all_reports)
