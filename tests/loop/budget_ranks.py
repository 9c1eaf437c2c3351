"""One rank of a loop in DDP or of shards, plainly and under a budget.

The ranks have other lengths and other budgets, so that each has plans of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import membudget as mb
from membudget._torch import is_fake
from tests.behaviours.one_plan_ranks import Collectives
from tests.behaviours.sharded_models import Feed, Feeds, batch, fsdp2, sharded
from tests.behaviours.sharded_ranks import local
from tests.faults.ranks import chosen, report_rank
from tests.loop.training import counted

STEPS, SHARE = 3, 0.75
REFUSED = ("FSDP1", "tensor parallel", "FSDP2 and tensor parallel")

Pass = Callable[[Any, list[Tensor], int], None]


def once(model: Any, given: list[Tensor], rank: int) -> None:
    model(given[0]).backward()


def accumulating(model: Any, given: list[Tensor], rank: int) -> None:
    """Run more micro-batches on one rank than on the other; the last one is sent."""
    with model.no_sync():
        for x in given[: 2 * rank]:
            model(x).backward()
    model(given[-1]).backward()


def together(model: Any, given: list[Tensor], rank: int) -> None:
    (model(given[0]) + model(given[1])).backward()


def sharded_accumulating(model: Any, given: list[Tensor], rank: int) -> None:
    """Accumulate whole gradients in two micro-batches; the third one reduces them."""
    model.set_requires_gradient_sync(False)
    for x in given[:2]:
        model(x).backward()
    model.set_requires_gradient_sync(True)
    model(given[2]).backward()


def evaluating(model: Any, given: list[Tensor], rank: int) -> None:
    """Call the model without gradients, which leaves its own parameters gathered."""
    model(given[0]).backward()
    with torch.no_grad():
        model(given[1])
    model(given[2]).backward()


class Levelled(Feed):
    """A block that asks for the level of all ranks, as synchronised norms do."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        level = x.detach().mean()
        dist.all_reduce(level)
        return x * torch.sigmoid(level)


class Levels(Feeds):
    """Four blocks, of which one communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Levelled())


class Counting(Feeds):
    """Feeds that count the rows of all ranks when they are evaluated."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            dist.all_reduce(torch.tensor(len(x)))
        return super().forward(x)


class Longest(Feeds):
    """Feeds that know the longest batch of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        longest = torch.tensor(x.shape[1])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return super().forward(x) * x.shape[1] / int(longest)


def ddp(**options: Any) -> Callable[[], nn.Module]:
    return lambda: DistributedDataParallel(Feeds(), **options)


CASES: dict[str, tuple[Callable[[], nn.Module], Pass]] = {
    "DDP": (ddp(), once),
    "DDP, static graph": (ddp(static_graph=True), once),
    "DDP, two forwards for one backward pass": (ddp(), together),
    "FSDP2": (partial(sharded, "FSDP2"), once),
    "FSDP2, accumulating": (partial(sharded, "FSDP2"), sharded_accumulating),
    "FSDP2, evaluating": (partial(sharded, "FSDP2"), evaluating),
    "DDP, other numbers of micro-batches": (ddp(), accumulating),
    "DDP, unused parameters": (ddp(find_unused_parameters=True), once),
    "DDP, buckets for gradients": (ddp(gradient_as_bucket_view=True), once),
    "DDP, wrapped inside of the budget": (ddp(), once),
    "FSDP2, not resharded": (partial(sharded, "FSDP2, not resharded"), once),
    "FSDP2 in bfloat16": (partial(sharded, "FSDP2 in bfloat16"), once),
    "FSDP2, two forwards for one backward pass": (partial(sharded, "FSDP2"), together),
    "DDP, a block communicates": (lambda: DistributedDataParallel(Levels()), once),
    "FSDP2, a block communicates": (lambda: fsdp2(Levels()), once),
    "FSDP2, evaluating over ranks": (lambda: fsdp2(Counting()), evaluating),
}


def batches(rank: int, step: int) -> list[Tensor]:
    return [batch(9 * step + n).repeat(8, 2 + 2 * rank + step % 2, 1) for n in range(3)]


def trained(
    name: str, rank: int, limit: int | None
) -> tuple[list[Tensor], int, dict[str, int], mb.Budgeted | None]:
    """Train; return all that it has made, its peak, its collectives, and the budget.

    It has made gradients, states of the optimizer, parameters, and the random stream.
    """
    make, run = CASES[name]
    torch.manual_seed(0)
    model: Any = make()
    held = model.module if "inside" in name else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    around: Any = nullcontext()
    torch.manual_seed(7 + rank)
    with counted() as seen, Collectives() as collectives:
        if limit is not None:
            around = mb.budget(held, limit, optimizer=optimizer)
        with around as fitted:
            for step in range(STEPS):
                run(model, batches(rank, step), rank)
                optimizer.step()
                last = [p.grad for p in model.parameters() if p.grad is not None]
                optimizer.zero_grad()
    states = [s for of in optimizer.state.values() for s in of.values()]
    made = map(local, [*last, *states, *(p.detach() for p in model.parameters())])
    counts = dict(collectives.counts)
    return [*made, torch.get_rng_state()], seen.most_bytes, counts, fitted


def compared(name: str, rank: int) -> dict[str, Any]:
    plain, plain_bytes, plain_collectives, _ = trained(name, rank, None)
    limit = int((SHARE + 0.1 * rank) * plain_bytes)
    found, peak_bytes, collectives, fitted = trained(name, rank, limit)
    assert fitted is not None
    status = fitted.status()
    return {
        "equal": len(found) == len(plain) and all(map(torch.equal, found, plain)),
        "collectives": [plain_collectives, collectives],
        "peak": peak_bytes,
        "limit": limit,
        "recomputes": sum(again for _, again in status.regions.values()),
        "uses": sum(s.uses for s in status.situations),
    }


def refusal(function: Callable[[], object]) -> str:
    try:
        function()
    except mb.OptionError as error:
        return str(error)
    return "no refusal"


def half_sharded() -> nn.Module:
    """Return a model of which the blocks alone are sharded."""
    model = Feeds()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    return model


def copied() -> nn.Module:
    """Return a model with copies of shards, along a dimension of their own."""
    model = Feeds()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
    return model


def called(model: nn.Module, held: nn.Module | None = None) -> Callable[[], object]:
    """Return a function that opens a budget on a model or its part, and calls it."""

    def call() -> None:
        with mb.budget(held or model, "1GiB"):
            model(batch(0))

    return call


def out_of_memory(rank: int) -> dict[str, Any]:
    """Report what is said, and how often `step` runs, where memory runs out.

    The budget is on what DDP wraps, so that nothing tells before of the other rank.
    """
    model, runs = DistributedDataParallel(Feeds()), []

    def fail(_: nn.Module, given: tuple[Tensor]) -> None:
        if not is_fake(*given):
            raise torch.OutOfMemoryError("none left")

    def run() -> None:
        runs.append(model.module.blocks[1].register_forward_pre_hook(fail))
        model(batch(rank))

    try:
        with mb.budget(model.module, "1GiB") as fitted:
            fitted.step(run)
    except torch.OutOfMemoryError as error:
        return {"runs": len(runs), "notes": "\n".join(error.__notes__)}
    return {"runs": len(runs), "notes": "no error"}


def refusals() -> dict[str, str]:
    part: Any = sharded("FSDP2")
    calls = {
        "integers": called(DistributedDataParallel(Longest())),
        "part": called(part, part.blocks[0]),
    }
    found = {name: refusal(call) for name, call in calls.items()}
    return {**found, **not_begun()}


def not_begun() -> dict[str, str]:
    ways = {way: partial(sharded, way) for way in REFUSED}
    models: dict[str, Callable[[], nn.Module]]
    models = {**ways, "half": half_sharded, "copied": copied}
    return {
        name: refusal(mb.budget(make(), "1GiB").start) for name, make in models.items()
    }


def all_reports(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    step = mb.budget(DistributedDataParallel(Feeds()), "1GiB").step
    return {
        "cases": {name: compared(name, rank) for name in chosen(CASES)},
        "out of memory": out_of_memory(rank),
        "refusals": {**refusals(), "step": refusal(lambda: step(lambda: None))},
    }


if __name__ == "__main__":
    report_rank(all_reports)
