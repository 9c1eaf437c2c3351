"""Predicted and measured steps of one rank of a mesh, in a process of its own.

The measured steps run on torch's fake process group, whose collectives return at once,
and on real tensors: they take what a rank of a cluster does, without gloo's threads.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import membudget as mb
from membudget._torch_distributed import fake_store, forget_meshes
from membudget.planning import plan_for
from tests.behaviours.sharded_models import Feeds as Plain


class Feeds(Plain):
    """Three blocks, with a plan of how to share each."""

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def half(model: Any, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=HALF, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=HALF)


CASES: dict[str, tuple[dict[str, int], Any]] = {
    "shards": ({"dp_shard": 4}, None),
    "uneven shards": ({"dp_shard": 3}, None),
    "tensor parallel": ({"tp": 2}, None),
    "both": ({"dp_shard": 4, "tp": 2}, None),
    "copies of shards": ({"dp_replicate": 2, "dp_shard": 2}, None),
    "all three": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, None),
    "in bfloat16, not resharded": ({"dp": 4}, half),
}
BATCH = (32, 32, 16)


def made() -> nn.Module:
    torch.manual_seed(0)
    return Feeds()


def measured(sizes: dict[str, int], parallelize: Any, x: Tensor, plan: Any) -> int:
    """Return the peak of a step on real tensors, sharded over a fake group."""
    from membudget.profile import mesh as of_mesh

    model: Any = made()
    count = torch.Size(sizes.values()).numel()
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=count)
    device_mesh = dist.device_mesh.init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )
    (parallelize or of_mesh._shard)(model, device_mesh)
    if plan is not None:
        mb.apply(model, plan)

    def step() -> None:
        model(x).backward()

    for _ in range(2):
        step()
        model.zero_grad()
    peak_bytes = mb.peak(step).peak_bytes
    dist.destroy_process_group()
    forget_meshes()
    return peak_bytes


def report(name: str) -> dict[str, Any]:
    sizes, parallelize = CASES[name]
    x = torch.randn(BATCH, generator=torch.Generator().manual_seed(0))
    model = made()
    kept = [p.clone() for p in model.parameters()]
    found = mb.profile(model, x, mesh=sizes, parallelize=parallelize)
    plan = plan_for(found, model, "70%")
    return {
        "plain": [found.peak_bytes, measured(sizes, parallelize, x, None)],
        "planned": [plan.peak_bytes, measured(sizes, parallelize, x, plan)],
        "regions": [region.path for region in plan.regions],
        "kinds": found.peak_by_kind(),
        "total": found.total_peak_bytes,
        "report": found.report(),
        "untouched": type(model) is Feeds
        and all(map(torch.equal, kept, model.parameters())),
        "alone": not dist.is_initialized(),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps({name: report(name) for name in CASES}))
