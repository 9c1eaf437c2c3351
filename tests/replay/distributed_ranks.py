"""One rank of replay regions under DistributedDataParallel, FSDP2 and tensor parallel.

Most cases are those of `tests.behaviours.distributed_ranks`: a function that trains a
model with a given region for some steps and returns the losses, the gradients, the
parameters and the random stream. Each is run plain once, and under replay regions with
several options; the rank reports "equal", or what differs, or the error.
"""

from __future__ import annotations

import functools
import itertools
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import membudget as mb
from tests.behaviours.distributed_ranks import (
    STEPS,
    WIDTH,
    Case,
    Layer,
    Once,
    Stack,
    data_parallel,
    ddp_cases,
    fsdp_cases,
    local,
    region_outside,
    sharded,
    train,
)
from tests.behaviours.steps import Region, plain, region_with
from tests.faults import fsdp_ranks
from tests.faults.ranks import WORLD_SIZE, chosen, report_rank
from tests.keeps import VERIFIES

KEEPS = {
    "nothing": mb.policies.nothing,
    "matmuls": mb.policies.matmuls,
    "everything": mb.policies.everything,
}
OPTIONS: dict[str, dict[str, Any]] = {
    f"{name}, {verify}": {"keep": keep, "verify": verify}
    for verify, (name, keep) in itertools.product(VERIFIES, KEEPS.items())
}


# DistributedDataParallel.


class Normed(Once):
    """Running statistics in the region, which DDP broadcasts in each forward."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y: Tensor = self.last(self.region(lambda x: self.norm(self.layer(x)), x))
        return y + 0.0 * sum(p.sum() for p in self.first.parameters())


# FSDP2.


def frozen(inside: bool, reshard: bool, region: Region, rank: int) -> list[Tensor]:
    """Train a model of which a layer, and one weight of another, are frozen."""
    torch.manual_seed(0)
    model = Stack(plain, region) if inside else Stack(region)
    for parameter in (*model.layers[1].parameters(), model.layers[2].up.weight):  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    return train(sharded(model, reshard_after_forward=reshard), rank)


def frozen_offloaded(region: Region, rank: int) -> list[Tensor]:
    """Do so under hooks that copy what is saved, as `save_on_cpu` does."""

    def region_under_hooks(function: Any, *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            return region(function, *args)

    return frozen(False, True, region_under_hooks, rank)


class Around(nn.Module):
    """A model in one region."""

    def __init__(self, region: Region, model: nn.Module) -> None:
        super().__init__()
        self.region = region
        self.model = model

    def forward(self, x: Tensor, step: int) -> Tensor:
        y: Tensor = self.region(self.model, x, step)
        return y


def around_all(region: Region, rank: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return train(Around(region, sharded(Stack(), **options)), rank)


def around_regions(region: Region, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    return train(Around(region, sharded(Stack(region, region))), rank)


def applied(shard_first: bool, region: Region, rank: int) -> list[Tensor]:
    """Put the regions on the model with `apply`."""
    torch.manual_seed(0)
    model = Stack()
    if shard_first:
        sharded(model)
    if region is not plain:
        mb.apply(model, blocks=Layer, **region.keywords)  # type: ignore[attr-defined]
    return train(model if shard_first else sharded(model), rank)


def gathers(reshard: bool, region: Region, rank: int) -> list[Tensor]:
    """Return the gradients, and how many all-gathers a step takes."""
    count, gradients = fsdp_ranks.train(fsdp_ranks.sharded(region, reshard), rank)
    return [torch.tensor(count), *map(torch.tensor, gradients)]


# Tensor parallel: the region records operators on DTensors, communication included.


def parallel(model: nn.Module) -> list[Tensor]:
    """Train on the same data in every rank, as tensor parallel wants it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH), step).square().sum()
        loss.backward()
        found += [local(loss), *(local(p.grad) for p in model.parameters())]
        optimizer.step()
    return [*found, *map(local, model.parameters()), torch.get_rng_state()]


def tensor_parallel(inside: bool, region: Region, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Stack(plain, region) if inside else Stack(region)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.layers:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, styles)
    return parallel(model)


class Sequenced(nn.Module):
    """A normalised layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y: Tensor = self.down(F.dropout(self.up(self.norm(x)).tanh(), 0.2))
        return y


def sequence_parallel(region: Region, rank: int) -> list[Tensor]:
    """Split the batch around the layer, and the width inside."""
    torch.manual_seed(0)
    layer = Sequenced()
    styles = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(layer, init_device_mesh("cpu", (WORLD_SIZE,)), styles)
    return parallel(Around(region, layer))


def all_cases() -> Iterator[tuple[str, Case]]:
    part = functools.partial
    for name, case in (*ddp_cases(), *fsdp_cases()):
        if "applied" not in name:
            yield name.partition(" ")[2], case
    yield "Normed", part(data_parallel, Normed, False, False)
    yield "Normed, static graph", part(data_parallel, Normed, True, False)
    for inside, reshard in itertools.product((False, True), repeat=2):
        where = "inside" if inside else "outside"
        how = "" if reshard else ", not resharded"
        yield f"frozen, region {where}{how}", part(frozen, inside, reshard)
    yield "frozen, offload outside", frozen_offloaded
    yield (
        "region around all, not resharded",
        part(around_all, reshard_after_forward=False),
    )
    yield "region around regions on both sides", around_regions
    offload = CPUOffloadPolicy(pin_memory=False)
    yield "parameters on the CPU", part(region_outside, offload_policy=offload)
    yield "applied, then sharded", part(applied, False)
    yield "sharded, then applied", part(applied, True)
    yield "gathers", part(gathers, True)
    yield "gathers, not resharded", part(gathers, False)
    yield "tensor parallel, region outside", part(tensor_parallel, False)
    yield "tensor parallel, region inside", part(tensor_parallel, True)
    yield "sequence parallel", sequence_parallel


CASES: dict[str, Case] = dict(all_cases())
_FEWER = ("nothing, True", "matmuls, fingerprints", "everything, False")
# All ways where FSDP frees parameters in a region or around it; elsewhere three do.
_OF_FSDP = ("region outside", "region inside", "region around", "frozen, region")
WAYS: dict[str, tuple[str, ...]] = {
    name: tuple(OPTIONS) if name.startswith(_OF_FSDP) else _FEWER for name in CASES
}


def outcome(case: Case, rank: int, region: Region, expected: list[Tensor]) -> str:
    """Return "equal", what differs, or the error of a case."""
    try:
        found = case(region, rank)
    except Exception:
        return traceback.format_exc(limit=-4)
    if len(found) != len(expected):
        return f"{len(found)} tensors in place of {len(expected)}"
    pairs = enumerate(zip(found, expected, strict=True))
    differing = [i for i, (a, b) in pairs if not torch.equal(a, b)]
    return f"of {len(found)}, these differ: {differing}" if differing else "equal"


def all_outcomes(rank: int) -> dict[str, dict[str, str]]:
    # DDP warns of unused parameters that it was told to look for in vain.
    warnings.simplefilter("ignore")
    # Nothing here runs unseen, so nothing may be kept.
    warnings.simplefilter("error", mb.UnrepeatableWarning)
    outcomes: dict[str, dict[str, str]] = {}
    for name in chosen(CASES):
        case = CASES[name]
        expected = case(plain, rank)
        outcomes[name] = {
            way: outcome(
                case, rank, region_with(engine="replay", **OPTIONS[way]), expected
            )
            for way in WAYS[name]
        }
    return outcomes


if __name__ == "__main__":
    report_rank(all_outcomes)
