"""Private names of FSDP2, so that a step of a sharded model is recorded without memory.

As in `_torch`, nothing else imports or reads these names. `fully_shard` keeps a state
for each unit, and in it what the unit's parameters are at the moment. There is no
public way to run a unit on other tensors, and a copy of a sharded model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

Twin = Callable[[Tensor], Tensor]


@contextmanager
def units_replaced(model: Module, twin: Twin) -> Iterator[None]:
    """Let the units of a model hold other tensors, and be as between two steps.

    Those that are gathered stay so: within its forward, the model itself is. Nothing is
    communicated inside. On exit, everything is as it was.

    Args:
        model: A model whose units `is_replaceable`.
        twin: Returns a tensor that takes the place of one of this rank's.
    """
    states = list(_states(model))
    kept = [(thing, dict(vars(thing))) for state in states for thing in _parts(state)]
    placed = list(_placed(states))
    gradients = [_unreduced(parameter) for parameter in _parameters(states)]
    gathered = [unit for unit in _units(model) if is_gathered(unit)]
    try:
        for state in states:
            _begin_anew(state)
        for parameter in _parameters(states):
            _replace(parameter, twin)
        if any(map(_is_any, gradients)):
            _give_unreduced(model, states, gradients, twin)
        for unit in gathered:
            unit.unshard()
        yield
    finally:
        for thing, attributes in kept:
            vars(thing).clear()
            vars(thing).update(attributes)
        for table, name, parameter in placed:
            table[name] = parameter


def is_replaceable(model: Module) -> bool:
    """Return whether `units_replaced` knows all that the units of a model hold.

    It knows neither copies of shards, nor parameters that are DTensors without FSDP or
    lie on the host, nor tensors that FSDP asks how to gather them (float8).
    """
    return all(
        group.mesh_info.mesh.ndim == 1
        and group.post_forward_mesh_info in (None, group.mesh_info)
        and not any(map(_is_special, group.fsdp_params))
        for group in _groups(_states(model))
    )


def is_part_of_unit(model: Any) -> bool:
    """Return whether FSDP has found another unit around this one in a forward."""
    return model._get_fsdp_state()._is_root is False


def is_gathered(unit: Any) -> bool:
    """Return whether the parameters of a unit are whole now."""
    return any(
        group.is_unsharded for group in unit._get_fsdp_state()._fsdp_param_groups
    )


def units_told(model: Module) -> Hashable:
    """Return what a step of the units depends on beside the parameters.

    That is whether each reduces its gradients after a backward pass, and whether it
    holds some that earlier ones have not.
    """
    return tuple(
        (group.reduce_grads, any(_is_any(_unreduced(p)) for p in group.fsdp_params))
        for group in _groups(_states(model))
    )


def _is_special(parameter: Any) -> bool:
    local = parameter.sharded_param._local_tensor
    is_asked = hasattr(local, "fsdp_pre_all_gather")
    return parameter.is_dtensor or parameter.offload_to_cpu or is_asked


def _states(model: Module) -> Iterator[Any]:
    known = set()
    for unit in _units(model):
        if id(state := unit._get_fsdp_state()) not in known:
            known.add(id(state))
            yield state


def _units(model: Module) -> Iterator[Any]:
    return (m for m in model.modules() if hasattr(m, "_get_fsdp_state"))


def _groups(states: Iterable[Any]) -> Iterator[Any]:
    return (group for state in states for group in state._fsdp_param_groups)


def _parameters(states: Iterable[Any]) -> Iterator[Any]:
    return (parameter for of in _groups(states) for parameter in of.fsdp_params)


def _parts(state: Any) -> Iterator[Any]:
    """Yield the objects whose attributes a step changes."""
    yield from (state, state._state_ctx, state._comm_ctx)
    for group in state._fsdp_param_groups:
        yield group
        yield from group.fsdp_params


def _placed(states: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield where modules hold the parameters of units, and what is there."""
    for parameter in _parameters(states):
        info = parameter._module_info
        modules = [info.module, *info.shared_modules]
        names = [info.param_name, *info.shared_param_names]
        for module, name in zip(modules, names, strict=True):
            yield module._parameters, name, module._parameters[name]


def _begin_anew(state: Any) -> None:
    """Put a unit between two steps, and let it send nothing."""
    idle = type(state._training_state).IDLE
    state._training_state = idle
    state._modules_to_run_forward = set()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    context = state._comm_ctx
    context.all_gather_state = None
    context.reduce_scatter_states, context.post_forward_order = [], []
    context._last_post_reduce_events = {}
    for group in state._fsdp_param_groups:
        group._training_state = idle
        group._post_forward_indices = []
        group._all_gather_result = group._post_reduce_event = None
        group._sharded_state = type(group._sharded_state).SHARDED
        group._all_gather_comm = _Silent(group._all_gather_comm)
        group._reduce_scatter_comm = _Silent(group._reduce_scatter_comm)


class _Silent:
    """Allocates what a collective of FSDP does, and sends nothing."""

    def __init__(self, comm: Any):
        """Store whom to ask for memory."""
        self.allocate = comm.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Return at once, as a collective that has ended."""


def _replace(parameter: Any, twin: Twin) -> None:
    """Let a parameter of a unit be sharded, and its shard another tensor."""
    old = parameter.sharded_param
    data = parameter._sharded_param_data = twin(parameter._sharded_param_data)
    padded = data.view(parameter.padded_sharded_param_size)
    dim, size = parameter.fsdp_placement.dim, parameter.sharded_size
    shard = padded.narrow(dim, 0, size[dim] if size.numel() else 0)
    new = Parameter(parameter.to_sharded_dtensor(shard), old.requires_grad)
    if old.grad is not None:
        new.grad = parameter.to_sharded_dtensor(torch.empty_like(shard))
    parameter.sharded_param = new
    parameter.sharded_state = type(parameter.sharded_state).SHARDED
    parameter.all_gather_outputs = []
    vars(parameter).pop("_unsharded_param", None)
    parameter._setattr_on_modules(new)


_Gradients = tuple[Tensor | None, Tensor | None]
"""Of a whole parameter, what no rank has received yet: autograd's, and those cast."""


def _unreduced(parameter: Any) -> _Gradients:
    unsharded = getattr(parameter, "_unsharded_param", None)
    gradient = None if unsharded is None else unsharded.grad
    return gradient, parameter.unsharded_accumulated_grad


def _is_any(gradients: _Gradients) -> bool:
    return any(gradient is not None for gradient in gradients)


def _give_unreduced(
    model: Module,
    states: Iterable[Any],
    gradients: Iterable[_Gradients],
    twin: Twin,
) -> None:
    """Give whole parameters, which are made for that, the gradients that they had."""
    for unit in _units(model):
        unit.unshard()
        unit.reshard()
    for parameter, (own, cast) in zip(_parameters(states), gradients, strict=True):
        if own is not None:
            parameter._unsharded_param.grad = twin(own)
        if cast is not None:
            parameter.unsharded_accumulated_grad = twin(cast)
