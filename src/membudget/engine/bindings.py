"""The names that modules bind: noted before a forward, restored for a recompute.

A forward may set attributes of its module, and `torch.func.functional_call` swaps a
module's parameters for the time of one call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from membudget.engine.reach import Reached
from membudget.scope import Scope

_ABSENT = object()


def rebind(namespace: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Make the dict `namespace` equal to `wanted`, in place."""
    for key in namespace.keys() - wanted.keys():
        del namespace[key]
    for key, value in wanted.items():
        if namespace.get(key, _ABSENT) is not value:
            namespace[key] = value


def namespaces_of(reached: Reached) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each module attribute dict that a forward may modify, with a copy.

    Activations stored on a module are detached in the copy, which would otherwise keep
    their graph alive, and with it the regions of the previous step.
    """
    pairs = []
    for module in reached.modules:
        buffers = module.__dict__["_buffers"]
        if buffers:
            pairs.append((buffers, buffers.copy()))
    for module in reached.stateful_modules:
        bound = module.__dict__.copy()
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                bound[key] = value.detach()
        pairs.append((module.__dict__, bound))
    return pairs


def parameters_of(reached: Reached) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each module's dict of parameters, with a copy that holds no graph."""
    pairs = []
    for module in reached.modules:
        held = module.__dict__["_parameters"]
        if held:
            copied = held.copy()
            for key, tensor in held.items():
                # `functional_call` swaps in what was computed from parameters.
                if tensor is not None and tensor.grad_fn is not None:
                    copied[key] = tensor.detach().requires_grad_()
            pairs.append((held, copied))
    return pairs


def enter_parameters(
    scope: Scope, pairs: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Bind the parameters that a forward saw, until `scope` ends.

    Parameters that FSDP has gathered or sharded since are left as they are.
    """
    for held, before in pairs:
        for key, tensor in before.items():
            now = held.get(key)
            if now is not tensor and _are_alike(now, tensor):
                scope.callback(held.__setitem__, key, now)
                held[key] = tensor


def _are_alike(one: Tensor | None, other: Tensor | None) -> bool:
    return (
        one is not None
        and other is not None
        and (one.shape, one.dtype) == (other.shape, other.dtype)
        and is_ordinary(one)
        and is_ordinary(other)
    )


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is no subclass such as a DTensor, which FSDP shards."""
    return type(tensor) in (Tensor, Parameter)
