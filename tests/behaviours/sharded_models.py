"""A small model, sharded in each way of row B2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.faults.ranks import WORLD_SIZE

WIDTH = 16


class Feed(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + F.dropout(self.down(hidden), 0.1)


class Feeds(nn.Module):
    """Three blocks; the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Feed() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def batch(rank: int) -> Tensor:
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(rank))


def data_parallel(model: Feeds) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: Feeds, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Feed}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


def fsdp2(model: Feeds, mesh: Any = None, **options: Any) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def parallel(model: Feeds, styles: dict[str, Any], mesh: Any = None) -> Feeds:
    mesh = mesh or init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    return model


def by_columns() -> dict[str, Any]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def by_sequence() -> dict[str, Any]:
    """Shard activations, too: all between the entry and the exit are DTensors."""
    whole, part = Replicate(), Shard(1)
    return {
        "": PrepareModuleInputOutput(
            input_layouts=(whole,),
            desired_input_layouts=(part,),
            output_layouts=(part,),
            desired_output_layouts=(whole,),
        ),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=part, use_local_output=False),
        "down": RowwiseParallel(output_layouts=part, use_local_output=False),
    }


def fsdp2_of_parallel(model: Feeds) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("data", "tensor"))
    return fsdp2(parallel(model, by_columns(), mesh["tensor"]), mesh["data"])


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DDP = "DDP"
WAYS: dict[str, Callable[[Feeds], nn.Module]] = {
    DDP: data_parallel,
    "FSDP1": partial(fsdp1, use_orig_params=False),
    "FSDP1 with original parameters": partial(fsdp1, use_orig_params=True),
    "FSDP2": fsdp2,
    "FSDP2, not resharded": partial(fsdp2, reshard_after_forward=False),
    "FSDP2 in bfloat16": partial(fsdp2, mp_policy=HALF),
    "tensor parallel": lambda model: parallel(model, by_columns()),
    "sequence parallel": lambda model: parallel(model, by_sequence()),
    "FSDP2 and tensor parallel": fsdp2_of_parallel,
}


def sharded(way: str) -> nn.Module:
    torch.manual_seed(0)
    return WAYS[way](Feeds())
