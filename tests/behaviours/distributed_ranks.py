"""One rank of behaviours 138-141: regions under DistributedDataParallel and FSDP2.

A case is a function that trains a model with a given region for some steps and returns
its gradients and parameters. It is run plain and with regions; the rank reports for
each case "equal", or what differs, or the error.
"""

from __future__ import annotations

import functools
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import membudget as mb
from tests.behaviours.steps import Region, plain
from tests.faults.ranks import WORLD_SIZE, report_rank

STEPS = 3
WIDTH = 6

Case = Callable[[Region, int], list[Tensor]]


class Layer(nn.Module):
    """A layer with dropout, which may be told to run a region inside."""

    def __init__(self, region: Region = plain) -> None:
        super().__init__()
        self.region = region
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.region(self.inner, x)
        return y

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(self.up(x).tanh(), 0.2))


class Once(nn.Module):
    """One region between two layers."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.first, self.layer = Layer(), Layer()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y: Tensor = self.last(self.region(self.layer, self.first(x)))
        return y


class Twice(Once):
    """The same layer in two regions."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.region(self.layer, self.first(x))
        y: Tensor = self.last(self.region(self.layer, x))
        return y


class Unused(Once):
    """A layer whose parameters no step uses."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.unused = Layer()


class Dynamic(Once):
    """Another layer in every step, in a region."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.choices = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, step: int) -> Tensor:
        choice = self.choices[step % 2]
        y: Tensor = self.last(self.region(lambda x: choice(self.layer(x)), x))
        return y + 0.0 * sum(p.sum() for p in self.first.parameters())


class Shared(Once):
    """Two layers in two regions, which share a weight with each other and outside."""

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        self.other = Layer()
        self.other.up.weight = self.layer.up.weight

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.region(self.other, self.region(self.layer, self.first(x)))
        hidden = F.linear(x, self.layer.up.weight)
        y: Tensor = self.last(F.linear(hidden, self.layer.down.weight))
        return y


def batches(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        yield torch.randn(4, WIDTH, generator=generator)


def local(tensor: Any) -> Tensor:
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().clone()


def train(model: nn.Module, rank: int, **keywords: Any) -> list[Tensor]:
    """Train `model`; return each step's loss and gradients, and the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    torch.manual_seed(100 + rank)
    for step, x in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = model(x, step).float().square().sum()
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [loss.detach(), *map(local, grads)]
        optimizer.step()
    return [*found, *map(local, model.parameters()), torch.get_rng_state()]


def data_parallel(
    kind: Callable[[Region], nn.Module],
    static: bool,
    unused: bool,
    region: Region,
    rank: int,
) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        kind(region), static_graph=static, find_unused_parameters=unused
    )
    return train(model, rank)


def accumulated(region: Region, rank: int) -> list[Tensor]:
    """Add up two micro-batches, of which only the second is synchronised."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Twice(region))
    x, y = itertools.islice(batches(rank), 2)
    with model.no_sync():
        model(x, 0).square().sum().backward()
    model(y, 1).square().sum().backward()
    return [local(p.grad) for p in model.parameters()]


class Stack(nn.Module):
    """Three layers, each called through `region`, with a region inside if asked."""

    def __init__(self, region: Region = plain, inside: Region = plain) -> None:
        super().__init__()
        self.region = region
        self.layers = nn.ModuleList(Layer(inside) for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            x = self.region(layer, x)
        return x


def sharded(model: Stack, **options: Any) -> Stack:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def region_outside(region: Region, rank: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return train(sharded(Stack(region), **options), rank)


def region_inside(region: Region, rank: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return train(sharded(Stack(inside=region), **options), rank)


def regions_on_both_sides(region: Region, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    return train(sharded(Stack(region, region)), rank)


def region_around_all(region: Region, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = sharded(Stack())

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, step: int) -> Tensor:
            y: Tensor = region(self.model, x, step)
            return y

    return train(Around(), rank)


def offloading(function: Callable[..., Tensor], *args: Any) -> Tensor:
    with save_on_cpu():
        return function(*args)


def offload_outside(region: Region, rank: int) -> list[Tensor]:
    """Offload what surrounds the regions, their inputs too."""

    def offloaded_region(function: Callable[..., Tensor], *args: Any) -> Tensor:
        return offloading(region, function, *args)

    return region_outside(offloaded_region, rank)


def offload_inside(region: Region, rank: int) -> list[Tensor]:
    """Offload what a part of each region saves; the region drops the rest."""

    def region_with_offload(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        y: Tensor = region(lambda x: function(offloading(torch.sin, x)), x)
        return y

    return region_inside(region_with_offload, rank)


def applied(shard_first: bool, region: Region, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Stack()
    if shard_first:
        sharded(model)
    if region is plain:
        return train(model if shard_first else sharded(model), rank)
    regions = mb.apply(model, blocks=Layer)
    found = train(model if shard_first else sharded(model), rank)
    assert [r.recomputes for r in regions.status().regions] == [STEPS] * 3
    return found


def ddp_cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases of DistributedDataParallel, each named by its behaviour first."""
    flags = ((static, unused) for static in (False, True) for unused in (False, True))
    for static, unused in flags:
        how = ", static graph" * static + ", unused are looked for" * unused
        for number, kind in ((138, Once), (139, Twice), (140, Shared)):
            run = functools.partial(data_parallel, kind, static, unused)
            yield f"{number} {kind.__name__}{how}", run
        if unused or static:
            yield (
                f"139 Unused{how}",
                functools.partial(data_parallel, Unused, static, unused),
            )
        if unused and not static:
            yield (
                f"139 Dynamic{how}",
                functools.partial(data_parallel, Dynamic, static, unused),
            )
    yield "139 Twice, accumulated", accumulated


def fsdp_cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases of FSDP2."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, run in (("outside", region_outside), ("inside", region_inside)):
        yield f"141 region {name}", run
        yield (
            f"141 region {name}, not resharded",
            functools.partial(run, reshard_after_forward=False),
        )
        yield (
            f"141 region {name}, bfloat16",
            functools.partial(run, mp_policy=half),
        )
    yield "141 regions on both sides", regions_on_both_sides
    yield "141 region around all", region_around_all
    yield "141 offload outside", offload_outside
    yield "141 offload inside", offload_inside
    yield "141 applied, then sharded", functools.partial(applied, False)
    yield "141 sharded, then applied", functools.partial(applied, True)


CASES: dict[str, Case] = dict([*ddp_cases(), *fsdp_cases()])


def outcome(case: Case, rank: int) -> str:
    """Return "equal", what differs, or the error of a case."""
    expected = case(plain, rank)
    try:
        found = case(mb.checkpoint, rank)
    except Exception:
        return traceback.format_exc(limit=-4)
    if len(found) != len(expected):
        return f"{len(found)} tensors in place of {len(expected)}"
    pairs = enumerate(zip(found, expected, strict=True))
    differing = [i for i, (a, b) in pairs if not torch.equal(a, b)]
    return f"of {len(found)}, these differ: {differing}" if differing else "equal"


def all_outcomes(rank: int) -> dict[str, str]:
    # DDP warns of unused parameters that it was told to look for in vain.
    warnings.simplefilter("ignore")
    return {name: outcome(case, rank) for name, case in CASES.items()}


if __name__ == "__main__":
    report_rank(all_outcomes)
