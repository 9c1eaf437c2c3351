"""One rank of a loop in DistributedDataParallel, plainly and under a budget.

The ranks have other lengths and other budgets, so that each has plans of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import membudget as mb
from tests.behaviours.sharded_models import Feeds, batch
from tests.faults.ranks import chosen, report_rank
from tests.loop.training import counted

STEPS, SHARE = 4, 0.75

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


CASES: dict[str, tuple[dict[str, Any], Pass]] = {
    "DDP": ({}, once),
    "static graph": ({"static_graph": True}, once),
    "two forwards for one backward pass": ({}, together),
    "unused parameters": ({"find_unused_parameters": True}, once),
    "buckets for gradients": ({"gradient_as_bucket_view": True}, once),
    "other numbers of micro-batches": ({}, accumulating),
    "wrapped inside of the budget": ({}, once),
}


def batches(rank: int, step: int) -> list[Tensor]:
    return [batch(9 * step + n).repeat(8, 2 + 2 * rank + step % 2, 1) for n in range(3)]


def trained(
    name: str, rank: int, limit: int | None
) -> tuple[list[Tensor], int, mb.Budgeted | None]:
    """Train; return gradients, parameters and the random stream, the peak, the budget.

    The gradients are summed up: copies of each step's would count as bytes of the loop.
    """
    options, run = CASES[name]
    torch.manual_seed(0)
    inner = Feeds()
    model: Any = DistributedDataParallel(inner, **options)
    held = inner if "inside" in name else model
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    around: Any = nullcontext()
    torch.manual_seed(7 + rank)
    with counted() as seen:
        if limit is not None:
            around = mb.budget(held, limit, optimizer=optimizer)
        with around as fitted:
            for step in range(STEPS):
                run(model, batches(rank, step), rank)
                optimizer.step()
                last = [p.grad for p in inner.parameters() if p.grad is not None]
                optimizer.zero_grad()
    states = [s for of in optimizer.state.values() for s in of.values()]
    parameters = [p.detach() for p in inner.parameters()]
    return [*last, *states, *parameters, torch.get_rng_state()], seen.most_bytes, fitted


def compared(name: str, rank: int) -> dict[str, Any]:
    plain, plain_bytes, _ = trained(name, rank, None)
    limit = int((SHARE + 0.1 * rank) * plain_bytes)
    found, peak_bytes, fitted = trained(name, rank, limit)
    assert fitted is not None
    status = fitted.status()
    return {
        "equal": len(found) == len(plain) and all(map(torch.equal, found, plain)),
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


def all_reports(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    model: nn.Module = DistributedDataParallel(Feeds())
    fitted = mb.budget(model, "1GiB")
    return {
        "cases": {name: compared(name, rank) for name in chosen(CASES)},
        "step": refusal(lambda: fitted.step(lambda: None)),
    }


if __name__ == "__main__":
    report_rank(all_reports)
