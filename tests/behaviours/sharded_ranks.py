"""One rank of row B2: what membudget says and does of models that are sharded.

Each use of a model is a function that returns "right", or says what is not; the rank
reports that, or the error.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.sharded_models import DDP, WAYS, Feed, batch, sharded
from tests.faults.ranks import chosen, report_rank

Model = nn.Module


def local(tensor: Any) -> Tensor:
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach().clone()


def trained(model: Model, x: Tensor) -> list[Tensor]:
    """Train two steps; return losses, gradients, parameters and the random stream."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found += [local(loss), *map(local, gradients)]
        optimizer.step()
    return [*found, *map(local, model.parameters()), torch.get_rng_state()]


def trains_as(expected: list[Tensor], model: Model, x: Tensor) -> str:
    found = trained(model, x)
    if len(found) != len(expected):
        return f"{len(found)} tensors in place of {len(expected)}"
    pairs = enumerate(zip(found, expected, strict=True))
    differing = [i for i, (a, b) in pairs if not torch.equal(a, b)]
    return f"of {len(found)}, these differ: {differing}" if differing else "right"


def profiled(model: Model, x: Tensor) -> str:
    static = mb.profile(model, x).graph.static
    held = mb.storage_bytes(model.parameters())
    return "right" if static.parameters == held else f"{static.parameters}, not {held}"


def step_profiled(model: Model, x: Tensor) -> str:
    found = mb.profile(lambda: model(x).backward(), modules=model)
    return "right" if found.peak_bytes else "no bytes"


def audited(model: Model, x: Tensor, **options: Any) -> str:
    report = mb.audit(model, x, blocks=Feed, **options)
    is_whole = report.compared.gradients and report.regions_ran == 3
    return "right" if report.equal and is_whole else str(report)


def with_regions(
    expected: list[Tensor], model: Model, x: Tensor, **options: Any
) -> str:
    """Train with regions, and say whether they recompute what the plain model does."""
    applied = mb.apply(model, blocks=Feed, **options)
    found = trains_as(expected, model, x)
    counts = [region.recomputes for region in applied.status().regions]
    applied.remove()
    return found if counts == [2] * 3 else f"{counts} recomputes"


def fitted(model: Model, x: Tensor) -> str:
    """Fit the model on all ranks together; row C12 has plans with regions."""
    found = mb.fit(model, x, "100%")
    return "right" if len(found.ranks) == dist.get_world_size() else "not together"


def fitted_inside(model: Any, x: Tensor) -> str:
    """Fit what is wrapped, on each rank by itself."""
    plan = mb.fit(model.module, x, "70%").plan
    return "right" if plan.regions else "no regions"


def planned_by_one(model: Any, x: Tensor) -> str:
    """Fit what is wrapped on one rank, and apply that plan on all."""
    plans: list[Any] = [None]
    if dist.get_rank() == 0:
        with mb.fit(model.module, x, "70%") as fitted:
            plans = [fitted.plan.to_json()]
    dist.broadcast_object_list(plans)
    applied = mb.apply(model.module, mb.Plan.from_json(plans[0]))
    return "right" if applied.status().regions else "no regions"


def fake_profiled(model: Model, x: Tensor) -> str:
    """Return the refusal, or "right"."""
    mb.profile(model, x, fake=True)
    return "right"


# The options of regions, and the uses after which a model must train as before.
REGIONS: dict[str, dict[str, Any]] = {
    "rerun": {},
    "replay": {"engine": "replay"},
    "keep": {"keep": mb.policies.matmuls},
}
USES: dict[str, Callable[[Model, Tensor], str]] = {
    "profile": profiled,
    "profile of a step": step_profiled,
    "fake profile": fake_profiled,
    "audit": audited,
    "audit of replay": lambda model, x: audited(model, x, engine="replay"),
    "fit": fitted,
}


def outcome(use: Callable[[Model, Tensor], str], model: Model, x: Tensor) -> str:
    try:
        return use(model, x)
    except mb.OptionError as error:
        return f"OptionError: {error}"
    except Exception:
        return traceback.format_exc(limit=-4)


def outcomes(way: str, rank: int) -> dict[str, str]:
    # Ranks that share the parts of one model share the batch.
    x = batch(0 if "parallel" in way else rank)
    expected = trained(sharded(way), x)
    found = {}
    for name, options in REGIONS.items():
        use = partial(with_regions, expected, **options)
        found[name] = outcome(use, sharded(way), x)
        dist.barrier()
    for name, other in USES.items():
        model = sharded(way)
        found[name] = outcome(other, model, x)
        dist.barrier()
        found[f"trained after {name}"] = trains_as(expected, model, x)
    if way == DDP:
        for name, under in (("fitted", fitted_inside), ("planned", planned_by_one)):
            model = sharded(way)
            found[name] = outcome(under, model, x)
            found[f"trained {name}"] = trains_as(expected, model, x)
    return found


def all_outcomes(rank: int) -> dict[str, dict[str, str]]:
    warnings.simplefilter("ignore")
    return {way: outcomes(way, rank) for way in chosen(WAYS)}


if __name__ == "__main__":
    report_rank(all_outcomes)
