"""One rank of accelerate's FSDP2 with dropout: plain, under its checkpointing, ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import membudget as mb
from membudget.sharding import sharding_of
from tests.behaviours.sharded_models import Feed, Feeds, batch
from tests.behaviours.sharded_ranks import local
from tests.faults.ranks import report_rank

BUDGET = "70%"

Around = Callable[[nn.Module, Tensor], object]


def prepared(checkpointing: bool) -> nn.Module:
    """Return a model that accelerate has sharded by `fully_shard`.

    `Accelerator.prepare` does so on accelerators alone; here its two functions do, in
    its order, with what they read of it.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Feed.__name__],
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
    )
    torch.manual_seed(0)
    model: nn.Module = Feeds()
    plugin.set_auto_wrap_policy(model)
    if checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    sharded: nn.Module = fsdp2_prepare_model(accelerator, model)
    return sharded


def trained(rank: int, around: Around, checkpointing: bool = False) -> list[Tensor]:
    """Train two steps; return gradients, parameters and the random stream."""
    model = prepared(checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = batch(rank).repeat(8, 4, 1)
    around(model, x)
    torch.manual_seed(7 + rank)
    found = []
    for _ in range(2):
        model(x).backward()
        found += [local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    found += [local(p.detach()).clone() for p in model.parameters()]
    return [*found, torch.get_rng_state()]


def all_reports(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    regions: list[mb.Applied] = []
    plain = trained(rank, lambda *_: None)
    under = {
        "theirs": trained(rank, lambda *_: None, checkpointing=True),
        "apply": trained(
            rank, lambda model, _: regions.append(mb.apply(model, blocks=Feed))
        ),
        "fit": trained(rank, lambda model, x: mb.fit(model, x, BUDGET)),
    }
    return {
        "sharded": sharding_of(prepared(False)),
        "recomputes": [r.recomputes for r in regions[0].status().regions],
        **{name: all(map(torch.equal, found, plain)) for name, found in under.items()},
    }


if __name__ == "__main__":
    report_rank(all_reports)
