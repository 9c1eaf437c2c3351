"""Shard a copy of a model over a mesh of processes that do not exist.

The copy has fake parameters, and torch's fake process group stands for the other ranks:
its collectives return at once. So the step of one rank of a cluster can be recorded in
a single process, without its memory.

    model ──copy──> fake parameters ──tp_plan, fully_shard──> shards of rank 0
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed
from torch.nn import Module

from membudget._torch_accelerator import main_device
from membudget._torch_distributed import fake_store, forget_meshes
from membudget.errors import OptionError
from membudget.profile.fake import fake_tensors, twin
from membudget.profile.optimizer_step import OptimizerLike
from membudget.selection import default_names
from membudget.step import CallableStep, Step

Parallelize = Callable[[Module, Any], Any]
"""Shards a model in place, given the model and a `DeviceMesh`."""

REPLICATE, SHARD, TENSOR = "dp_replicate", "dp_shard", "tp"
"""The dimensions whose sharding is known: copies, FSDP2's shards, tensor parallel."""

_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output")


@contextmanager
def sharded_copy(
    model: Module, mesh: Mapping[str, int], parallelize: Parallelize | None = None
) -> Iterator[Module]:
    """Yield a copy of a model, sharded as rank 0 of a mesh has it, without memory.

    Args:
        model: Any module, which stays as it is; its parameters may be on `meta`.
        mesh: Number of processes along each dimension, outermost first.
        parallelize: Shards the copy. By default, `tp` applies what the model's
            `tp_plan` says, and `dp_shard` is `fully_shard` of each default block and of
            the model, replicated along `dp_replicate`.

    Raises:
        OptionError: If the mesh is no mesh or has dimensions of which nothing is known,
            or this process belongs to a process group.
    """
    _check(model, mesh, parallelize)
    with _fake_group(math.prod(mesh.values())):
        with fake_tensors([]):
            found = copy.deepcopy(model, _twins(model))
            made = torch.distributed.device_mesh.init_device_mesh(
                main_device(found.parameters()).type,
                tuple(mesh.values()),
                mesh_dim_names=tuple(mesh),
            )
            (parallelize or _shard)(found, made)
        yield found


def check_for_mesh(step: Step, optimizer: OptimizerLike, fake: bool | None) -> None:
    """Reject what goes with a model that is there, not with a sharded copy of it.

    Raises:
        OptionError: If there is any such thing.
    """
    if fake is False:
        raise OptionError(
            "mesh= simulates processes that do not exist, so the step must run on fake "
            "tensors: omit fake=False or mesh="
        )
    if isinstance(step, CallableStep):
        raise OptionError(
            "a step function calls the model itself, not a sharded copy of it: give "
            "profile a mesh with (model, batch, loss_fn)"
        )
    if not isinstance(optimizer, type | None):
        raise OptionError(
            f"the {type(optimizer).__name__} is over the parameters of the model, not "
            "over those of a sharded copy: give its class, as in optimizer="
            f"{type(optimizer).__name__}"
        )


def _check(
    model: Module, mesh: Mapping[str, int], parallelize: Parallelize | None
) -> None:
    sizes = list(mesh.values()) if isinstance(mesh, Mapping) else []
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise OptionError(
            "mesh is the number of processes along each dimension, such as "
            f"{{'dp_shard': 8, 'tp': 2}}; got {mesh!r}"
        )
    if torch.distributed.is_initialized():
        raise OptionError(
            "this process belongs to a process group, and a mesh of processes that do "
            "not exist needs one of its own: call it before init_process_group"
        )
    if parallelize is not None:
        return
    unknown = [name for name in mesh if name not in (REPLICATE, SHARD, TENSOR)]
    if unknown:
        raise OptionError(
            f"nothing is known of the mesh's dimension {unknown[0]!r}: use 'dp_shard', "
            "'dp_replicate' and 'tp', or pass parallelize=function(model, mesh)"
        )
    if REPLICATE in mesh and SHARD not in mesh:
        raise OptionError(
            "'dp_replicate' copies what 'dp_shard' shards: add 'dp_shard', of 1 for "
            "copies that are whole"
        )
    if TENSOR in mesh and not getattr(model, "tp_plan", None):
        raise OptionError(
            f"{type(model).__name__} has no tp_plan, which says how 'tp' shards its "
            "modules, as transformers' models do: pass parallelize=function(model, "
            "mesh), which shards as your training does"
        )


@contextmanager
def _fake_group(size: int) -> Iterator[None]:
    """Let this process be rank 0 of a group whose other processes do not exist."""
    before = sys.excepthook
    torch.distributed.init_process_group(
        "fake", store=fake_store(), rank=0, world_size=size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = before  # Which has been told to say "[rank0]".
        forget_meshes()


def _twins(model: Module) -> dict[int, Any]:
    """Return fake tensors for a copy's parameters and floating buffers, by `id`."""
    found: dict[int, Any] = {id(p): twin(p) for p in model.parameters()}
    for buffer in model.buffers():
        if buffer.is_meta or buffer.is_floating_point():
            found[id(buffer)] = twin(buffer)
    return found


def _shard(model: Any, mesh: Any) -> None:
    """Shard a model by its `tp_plan`, and its blocks by `fully_shard`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    names = mesh.mesh_dim_names
    if TENSOR in names:
        plan = {path: _style(style) for path, style in model.tp_plan.items()}
        parallelize_module(model, mesh[TENSOR], plan)
    if SHARD in names:
        over = (REPLICATE, SHARD) if REPLICATE in names else (SHARD,)
        for name in default_names(model):
            fully_shard(model.get_submodule(name), mesh=mesh[over])
        fully_shard(model, mesh=mesh[over])


def _style(style: Any) -> Any:
    """Return the parallel style that a `tp_plan` names, or gives."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if not isinstance(style, str):
        return style
    if style in _COLUMNS:
        whole = style != _COLUMNS[0]
        return ColwiseParallel(output_layouts=Replicate() if whole else None)
    if style == "rowwise":
        return RowwiseParallel()
    raise OptionError(
        f"the tp_plan names the style {style!r}, which is none of "
        f"{', '.join(_COLUMNS)} and rowwise: pass parallelize=function(model, mesh)"
    )
