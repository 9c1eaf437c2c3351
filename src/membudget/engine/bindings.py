"""The names that modules bind: noted before a forward, restored for a recompute.

A forward may set attributes of its module, and `torch.func.functional_call` swaps a
module's parameters for the time of one call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from membudget.engine.reach import Reached

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
        for name in ("_buffers", "_parameters"):
            held = module.__dict__[name]
            if held:
                pairs.append((held, _without_graphs(held)))
    for module in reached.stateful_modules:
        bound = module.__dict__.copy()
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                bound[key] = value.detach()
        pairs.append((module.__dict__, bound))
    return pairs


def _without_graphs(held: dict[str, Any]) -> dict[str, Any]:
    """Copy a dict of parameters or buffers; `functional_call` swaps in non-leaves."""
    copied = held.copy()
    for key, tensor in held.items():
        if tensor is not None and tensor.grad_fn is not None:
            copied[key] = tensor.detach().requires_grad_()
    return copied
