"""Recognise models that several processes train together, by wrappers and DTensors.

The classes are looked up among what is already imported: a model that uses none of them
does not pay for loading `torch.distributed`.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from membudget.errors import OptionError


def sharding_of(model: Module) -> str | None:
    """Say how a model's parameters are sharded over processes; `None` if not."""
    parameters = list(model.parameters())
    kind = _imported("torch.distributed.tensor", "DTensor")
    sharded: list[Any] = [p for p in parameters if isinstance(p, kind)]
    if sharded:
        sizes = sorted({p.device_mesh.size() for p in sharded})
        over = " and ".join(map(str, sizes))
        return (
            f"{len(sharded)} of {len(parameters)} parameters are DTensors over a mesh "
            f"of {over}"
        )
    wrapped = [m for m in model.modules() if isinstance(m, _fsdp_classes())]
    if wrapped:
        return f"FSDP shards the parameters of {len(wrapped)} modules"
    return None


def replicas_of(model: Module) -> int:
    """Return over how many processes DDP averages a model's gradients; 1 without it."""
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    return max((wrapper.process_group.size() for wrapper in wrappers), default=1)


def check_replaceable(model: Module) -> None:
    """Reject a model whose parameters a fake profile cannot replace.

    Raises:
        OptionError: If a wrapper (DDP, FSDP) holds the parameters in its own tensors.
    """
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, *_fsdp_classes())):
            is_ddp = isinstance(module, DistributedDataParallel)
            raise OptionError(
                f"{'DistributedDataParallel' if is_ddp else 'FSDP'} holds the "
                f"parameters of {type(model).__name__} in tensors of its own, which a "
                "fake profile cannot replace: pass fake=False, or profile the model "
                "without the wrapper"
            )


def _fsdp_classes() -> tuple[type, ...]:
    place = "torch.distributed.fsdp"
    return (
        *_imported(place, "FSDPModule"),
        *_imported(place, "FullyShardedDataParallel"),
    )


def _imported(module: str, name: str) -> tuple[type, ...]:
    """Return a class of a module that is imported already, or nothing."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
