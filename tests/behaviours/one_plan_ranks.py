"""One rank of row C12: ranks that train one model fit it together, with one plan.

Each configuration is a way to shard a small model and to run its step. A block's
gathered parameters are less than 1 % of the peak, because gloo's threads keep them for
longer in one run than in another.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from tests.behaviours.sharded_models import WAYS, Feeds, batch, data_parallel, sharded
from tests.behaviours.sharded_ranks import local
from tests.faults.ranks import chosen, report_rank

BUDGET = "70%"
RUNS = 5

Model = nn.Module
Make = Callable[[], Model]


def ddp(**options: Any) -> Make:
    torch.manual_seed(0)
    return lambda: DistributedDataParallel(Feeds(), **options)


def once(model: Model, x: Tensor) -> None:
    model(x).backward()


def twice(model: Any, x: Tensor) -> None:
    """Accumulate two micro-batches, of which the first is not communicated."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if not is_ddp:
        model.set_requires_gradient_sync(False)
    with model.no_sync() if is_ddp else nullcontext():
        model(x).backward()
    if not is_ddp:
        model.set_requires_gradient_sync(True)
    model(x).backward()


SHARDED = [way for way in WAYS if "FSDP1" not in way and way != "DDP"]
CASES: dict[str, tuple[Make, Callable[[Any, Tensor], None]]] = {
    "DDP": (ddp(), once),
    "DDP, static graph": (ddp(static_graph=True), once),
    "DDP, unused parameters": (ddp(find_unused_parameters=True), once),
    "DDP, buckets for gradients": (ddp(gradient_as_bucket_view=True), once),
    "DDP, accumulating": (ddp(), twice),
    **{way: (partial(sharded, way), once) for way in SHARDED},
    "FSDP2, accumulating": (lambda: sharded("FSDP2"), twice),
}


class Collectives(TorchDispatchMode):
    """Count the collectives of FSDP and DDP that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.name().startswith("c10d::"):
            self.counts[func.name()] += 1
        return func(*args, **kwargs or {})


def trained(step: Callable[[], None], model: Model) -> list[Tensor]:
    """Train two steps; return gradients, parameters, and the random stream."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        step()
        found += [local(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
    model.zero_grad()
    return [*found, *map(local, model.parameters()), torch.get_rng_state()]


def peaks(step: Callable[[], None], model: Model) -> list[int]:
    """Return the peaks of some steps, after one that fills caches."""
    found = []
    for _ in range(RUNS + 1):
        model.zero_grad()
        found.append(mb.peak(step).peak_bytes)
    model.zero_grad()
    return found[1:]


def collectives(step: Callable[[], None], model: Model) -> dict[str, int]:
    with Collectives() as inside:
        step()
    model.zero_grad()
    return dict(inside.counts)


def measured(name: str, rank: int) -> dict[str, Any]:
    """Fit one configuration, and report what the plain and the planned step take."""
    make, run = CASES[name]
    # Ranks that share the parts of one model share the batch.
    x = batch(0 if "parallel" in name else rank).repeat(8, 4, 1)
    torch.manual_seed(0)
    plain = make()
    expected = trained(lambda: run(plain, x), plain)
    torch.manual_seed(0)
    model = make()

    def step() -> None:
        once(model, x)

    plain_peaks = peaks(step, model)
    plain_collectives = collectives(step, model)
    fitted = mb.fit(model, x, BUDGET)
    planned_collectives = collectives(step, model)
    planned_peaks = peaks(step, model)
    torch.manual_seed(0)
    fresh = make()
    applied = mb.apply(fresh, fitted.plan)
    found = trained(lambda: run(fresh, x), fresh)
    return {
        "plan": sha256(fitted.plan.to_json().encode()).hexdigest(),
        "regions": [region.path for region in fitted.plan.regions],
        "recomputes": sum(r.recomputes for r in applied.status().regions),
        "budget": fitted.plan.budget_bytes,
        "plain": [fitted.profile.peak_bytes, plain_peaks],
        "planned": [fitted.plan.peak_bytes, planned_peaks],
        "collectives": [plain_collectives, planned_collectives],
        "equal": len(found) == len(expected) and all(map(torch.equal, found, expected)),
        "rows": len(fitted.ranks),
        "report": fitted.report(),
    }


class Uneven(Feeds):
    """Runs one operator more if it is told to."""

    more = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin() if self.more else x)


def longer(rank: int) -> dict[str, Any]:
    """Fit where one rank has longer sequences, and is slowed down by more work."""
    model: Any = sharded("FSDP2")
    x = batch(rank).repeat(8, 4 + 4 * rank, 1)
    work = torch.ones(1 << 22 if rank else 8)
    model.blocks[0].register_forward_pre_hook(lambda *_: (work.sum(), None)[1])
    fitted = mb.fit(model, x, BUDGET)
    return {
        "budget": fitted.plan.budget_bytes,
        "plain": [r.plain_bytes for r in fitted.ranks],
        "planned": [r.peak_bytes for r in fitted.ranks],
        "seconds": [r.seconds for r in fitted.ranks],
        "plan": fitted.plan.to_json(),
    }


class Dropping(Feeds):
    """Drops blocks at random."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if torch.rand(()) < 0.5 else x
        return self.head(x).square().mean()


def dropping(rank: int) -> dict[str, Any]:
    """Fit where each rank drops other blocks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Dropping(), find_unused_parameters=True)
    x = batch(rank).repeat(8, 4, 1)
    torch.manual_seed(rank)
    fitted = mb.fit(model, x, BUDGET)
    return {
        "draws": fitted.profile.draws,
        "regions": [region.path for region in fitted.plan.regions],
        "plan": fitted.plan.to_json(),
        "budget": fitted.plan.budget_bytes,
        "peaks": peaks(partial(once, model, x), model),
    }


def refused(model: Model, rank: int, budget: str) -> str:
    try:
        mb.fit(model, batch(rank), budget)
    except mb.MembudgetError as error:
        return f"{type(error).__name__}: {error}"
    return "no refusal"


def other_operators(rank: int) -> str:
    torch.manual_seed(0)
    model: Any = data_parallel(Uneven())
    model.module.more = bool(rank)
    return refused(model, rank, BUDGET)


def guarded(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception:
        return traceback.format_exc(limit=-4)


def all_reports(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found = {name: guarded(measured, name, rank) for name in chosen(CASES)}
    dist.barrier()
    return {
        "cases": found,
        "longer": guarded(longer, rank),
        "dropping": guarded(dropping, rank),
        "other operators": guarded(other_operators, rank),
        "too little": guarded(refused, sharded("FSDP2"), rank, "40KB"),
    }


if __name__ == "__main__":
    report_rank(all_reports)
