"""Recognise models that several processes train together, by wrappers and DTensors.

The classes are looked up among what is already imported: a model that uses none of them
does not pay for loading `torch.distributed`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from membudget._torch import is_fake
from membudget._torch_distributed import wrapper_in_forward
from membudget._torch_fsdp import is_gathered
from membudget.errors import OptionError
from membudget.state.bits import plain_parts


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


def flattened_of(model: Module) -> int:
    """Return of how many modules FullyShardedDataParallel flattens the parameters."""
    kind = _imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    return sum(isinstance(module, kind) for module in model.modules())


def replicas_of(model: Module) -> int:
    """Return over how many processes DDP averages a model's gradients; 1 without it."""
    wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    return max((wrapper.process_group.size() for wrapper in wrappers), default=1)


def ranks_of(model: Module) -> int:
    """Return how many processes train a model together, by DDP or DTensors."""
    kind = _imported("torch.distributed.tensor", "DTensor")
    parameters: list[Any] = [p for p in model.parameters() if isinstance(p, kind)]
    sizes: list[int] = [p.device_mesh.size() for p in parameters]
    return max(replicas_of(model), *sizes, 1)


def ranks_around(model: Module) -> int:
    """Return how many processes train a model together, which is in its forward.

    The model may be part of what a DistributedDataParallel wraps.
    """
    wrapper = wrapper_in_forward()
    return max(ranks_of(model), 1 if wrapper is None else replicas_of(wrapper))


def unwrapped_model(model: Module) -> Module:
    """Return what a DistributedDataParallel wraps, or else the model itself.

    Plans name modules and parameters as the model without the wrapper does.
    """
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_replaceable(model: Module) -> None:
    """Reject a model whose parameters a fake profile cannot replace.

    Raises:
        OptionError: If a wrapper (DDP, FSDP) holds the parameters in its own tensors.
    """
    if has_fake_shards(model):
        return
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, *_fsdp_classes())):
            is_ddp = isinstance(module, DistributedDataParallel)
            raise OptionError(
                f"{'DistributedDataParallel' if is_ddp else 'FSDP'} holds the "
                f"parameters of {type(model).__name__} in tensors of its own, which a "
                "fake profile cannot replace: pass fake=False, or profile the model "
                "without the wrapper"
            )


def is_fully_sharded(model: Module) -> bool:
    """Return whether FSDP2's `fully_shard` has sharded any of a model's modules."""
    kind = _imported("torch.distributed.fsdp", "FSDPModule")
    return bool(kind) and any(isinstance(m, kind) for m in model.modules())


def has_fake_shards(model: Module) -> bool:
    """Return whether FSDP2 has sharded a model, and all its shards are fake."""
    parts = (part for p in model.parameters() for part in plain_parts(p))
    return is_fully_sharded(model) and all(map(is_fake, parts))


def units_of(model: Module) -> Iterator[str]:
    """Yield the names of the modules that `fully_shard` shards as units."""
    kind = _imported("torch.distributed.fsdp", "FSDPModule")
    return (name for name, m in model.named_modules() if isinstance(m, kind))


def around_units(model: Module) -> Iterator[str]:
    """Yield the names of the modules inside of which there are units of `fully_shard`.

    Those are named as in the model that DistributedDataParallel may wrap.
    """
    for name, module in unwrapped_model(model).named_modules():
        if any(inside for inside in units_of(module)):
            yield name


def prepare_units(model: Module) -> None:
    """Let FSDP2 make what each unit gathers into, which is freed until a step needs it.

    FSDP would make it in its first step, which therefore takes other bytes than those
    that follow. A unit that is gathered has it.
    """
    for name in units_of(model):
        unit: Any = model.get_submodule(name)
        if not is_gathered(unit):
            unit.unshard()
            unit.reshard()


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


def not_a_module(given: Any) -> OptionError:
    """Return the error for what is no module; that of a pipeline names what fits it."""
    of_torch = "torch.distributed.pipelining"
    parts = given if isinstance(given, list | tuple) else [given]
    for part in parts:
        if any(kind.__module__.startswith(of_torch) for kind in type(part).__mro__):
            return OptionError(
                f"a {type(part).__name__} is part of a pipeline, whose stages are "
                "fitted together: give its blocks to membudget.pipeline.fit_pipeline("
                "blocks, micro_batch, budget, micro_batches=...), and the plan to "
                "pipeline.split and pipeline.PipelineSchedule"
            )
    return OptionError(
        f"expected a torch.nn.Module and its batch; got {type(given).__name__}"
    )
