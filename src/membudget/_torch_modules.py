"""Private names of torch's modules and parameters, each with the reason.

As in `_torch`, nothing else imports or reads these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module, Parameter
from torch.nn.utils import parametrize


def is_compiled(module: Module) -> bool:
    """Return whether calls of a module run compiled code.

    `Module.compile` sets `_compiled_call_impl`; `torch.compile` returns a wrapper with
    the module as `_orig_mod`. No public name tells.
    """
    compiled_call: Any = getattr(module, "_compiled_call_impl", None)
    return compiled_call is not None or hasattr(module, "_orig_mod")


def has_forward_hooks(module: Module) -> bool:
    """Return whether a module has hooks of its own that run around its forward.

    Hooks are registered publicly, but no public name tells whether there are any.
    """
    return bool(module._forward_pre_hooks or module._forward_hooks)


def own_parameters(modules: Iterable[Module]) -> list[Parameter]:
    """Return the parameters that modules hold themselves; a shared one comes again.

    `Module.parameters` takes ten times as long, to leave out what comes again and to
    make names; this runs before each forward of a loop.
    """
    held = (parameter for m in modules for parameter in m._parameters.values())
    return [parameter for parameter in held if parameter is not None]


def is_asked(tensor: Tensor) -> bool:
    """Return whether the backward pass that runs now computes a tensor's gradient.

    `_will_engine_execute_node` refuses to answer for a leaf that `autograd.grad` was
    asked for, which is an answer.
    """
    node = get_gradient_edge(tensor).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


@contextmanager
def without_gradient_hooks(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Suspend hooks that run when a gradient is complete: they may step optimizers.

    `register_post_accumulate_grad_hook` adds to a table, which autograd refers to. It
    can be emptied, and no public name lists what was in it.
    """
    tables = [parameter._post_accumulate_grad_hooks for parameter in parameters]
    kept = [(table, dict(table)) for table in tables if table]
    for table, _ in kept:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in kept:
            table.update(hooks)


def parametrized_cache() -> dict[Any, Any]:
    """Return what `torch.nn.utils.parametrize.cached()` has computed so far.

    No public name gives access to it, and no other call would compute it again.
    """
    cache: dict[Any, Any] = parametrize._cache
    return cache
