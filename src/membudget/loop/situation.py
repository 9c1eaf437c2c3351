"""What tells micro-batches apart that need different plans.

Micro-batches of one *kind* run the same code: the arguments are alike but for the sizes
of tensors, and so are autocast, training flags, what is trained and which gradients are
there. Those of one *situation* are of one kind and of the same sizes.
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import tree_iter
from membudget._torch_modules import own_parameters
from membudget.state.autocast import autocast_state
from membudget.state.identity import is_leaf

Sizes = tuple[int, ...]

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Situation(NamedTuple):
    """What a micro-batch is, as far as its plan depends on it.

    Attributes:
        kind: Everything but the sizes.
        sizes: Lengths of all dimensions of the tensors among the arguments, in order.
    """

    kind: Hashable
    sizes: Sizes


def situation_of(
    model: Module, args: tuple[Any, ...], kwargs: dict[str, Any], pending: int
) -> Situation:
    """Return the situation of a call of the model that is about to run.

    Args:
        model: The model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        pending: Number of earlier forwards whose backward pass has yet to begin.
    """
    told: list[Hashable] = []
    sizes: list[int] = []
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, Tensor):
            shape = leaf.shape
            told.append((len(shape), leaf.dtype, leaf.device, leaf.requires_grad))
            sizes += shape
        elif isinstance(leaf, _PLAIN):
            told.append((type(leaf), leaf))
        else:
            told.append(type(leaf).__qualname__)
    modules = list(model.modules())
    training = bytes([module.training for module in modules])
    parameters = bytes(
        [
            2 * p.requires_grad + (is_leaf(p) and p.grad is not None)
            for p in own_parameters(modules)
        ]
    )
    kind = (
        *(tuple(told), tuple(kwargs), autocast_state(), pending),
        *(parameters, training, torch.get_default_dtype()),
    )
    return Situation(kind, tuple(sizes))


def key_of(kind: Hashable) -> str:
    """Return the name of a kind of situations, the same in every process."""
    return sha256(repr(kind).encode()).hexdigest()[:16]


def sizes_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the shapes of a call's tensors as text, each once, such as `4x128`."""
    leaves = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor))
    shapes = ("x".join(map(str, leaf.shape)) or "scalar" for leaf in leaves)
    return ", ".join(dict.fromkeys(shapes)) or "no tensors"
