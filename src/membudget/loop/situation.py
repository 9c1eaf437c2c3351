"""What tells micro-batches apart that need different plans.

Micro-batches of one *kind* run the same code: the arguments are alike but for the sizes
of tensors, and so are autocast, training flags, what is trained and which gradients are
there. Those of one *situation* are of one kind and of the same sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import sha256
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import is_fake, may_read_bytes, tree_iter
from membudget._torch_fsdp import units_told
from membudget._torch_modules import own_parameters
from membudget.sharding import is_fully_sharded
from membudget.state.autocast import autocast_state
from membudget.state.identity import is_leaf
from membudget.state.walk import walk

Sizes = tuple[int, ...]

_TOLD = (bool, str, type(None), torch.dtype, torch.device)
_PLAIN = (*_TOLD, int, float)


class Situation(NamedTuple):
    """What a micro-batch is, as far as its plan depends on it.

    Attributes:
        kind: Everything but the sizes.
        sizes: Lengths of all dimensions of the tensors among the arguments, in order.
    """

    kind: Hashable
    sizes: Sizes


def situation_of(
    model: Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pending: int,
    has_casts: bool = False,
) -> Situation:
    """Return the situation of a call of the model that is about to run.

    Args:
        model: The model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        pending: Number of earlier forwards whose backward pass has yet to begin.
        has_casts: Whether autocast has cached casts of the model's parameters.
    """
    told, sizes = _told(args, kwargs, _PLAIN)
    modules = list(model.modules())
    # What `functional_call` puts in their place may be no leaf.
    parameters = bytes(
        [
            4 * is_leaf(p) + 2 * p.requires_grad + (is_leaf(p) and p.grad is not None)
            for p in own_parameters(modules)
        ]
    )
    kind = (
        *(told, tuple(kwargs), autocast_state(), pending),
        *(parameters, _training(modules), torch.get_default_dtype()),
        *((units_told(model),) if is_fully_sharded(model) else ()),
        *(("casts",) if has_casts else ()),
    )
    return Situation(kind, sizes)


def evaluation_of(
    model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Situation:
    """Return the situation of a call without gradients that is about to run.

    Integers among the arguments count as sizes, too: where generation goes on, they say
    how many tokens there are. Floating-point numbers make no difference.
    """
    told, sizes = _told(args, kwargs, _TOLD)
    training = _training(model.modules())
    kind = told, tuple(kwargs), autocast_state(), training, torch.get_default_dtype()
    return Situation(kind, sizes)


def _told(
    args: tuple[Any, ...], kwargs: dict[str, Any], by_value: tuple[type, ...]
) -> tuple[Hashable, Sizes]:
    """Return what arguments are, those of some types by value, and all sizes."""
    told: list[Hashable] = []
    sizes: list[int] = []
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, Tensor):
            shape = leaf.shape
            told.append((len(shape), leaf.dtype, leaf.device, leaf.requires_grad))
            sizes += shape
        elif isinstance(leaf, by_value):
            told.append((type(leaf), leaf))
        elif type(leaf) is int:
            told.append(int)
            sizes.append(abs(leaf))
        else:
            told.append(type(leaf).__qualname__)
            shapes = [tensor.shape for tensor in _inside(leaf)]
            told += map(len, shapes)
            sizes += chain.from_iterable(shapes)
    return tuple(told), tuple(sizes)


def _inside(leaf: Any) -> list[Tensor]:
    """Return the tensors in an argument that torch's trees take for a leaf.

    Such are dataclasses, `UserDict` (a `BatchEncoding`) and objects of the user's.
    """
    if isinstance(leaf, Module):
        return []
    return [tensor for _, tensor in walk([("", leaf)]).tensors.values()]


def _training(modules: Iterable[Module]) -> bytes:
    return bytes([module.training for module in modules])


def may_be_trained(
    model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether a backward pass may follow a call, which hooks can serve."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    if not may_read_bytes():  # Inside a transform of `torch.func`.
        return False
    parameters = own_parameters(model.modules())
    return any(t.requires_grad for t in (*parameters, *tensors_of(args, kwargs)))


def has_fakes(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is on tensors without memory."""
    first = islice(model.parameters(), 1)
    return any(is_fake(t) or t.is_meta for t in (*first, *tensors_of(args, kwargs)))


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, in order."""
    found: list[Tensor] = []
    for leaf in tree_iter((args, kwargs)):
        found += [leaf] if isinstance(leaf, Tensor) else _inside(leaf)
    return found


def key_of(kind: Hashable) -> str:
    """Return the name of a kind of situations, the same in every process."""
    return sha256(repr(kind).encode()).hexdigest()[:16]


def sizes_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the shapes of a call's tensors as text, each once, such as `4x128`."""
    leaves = tensors_of(args, kwargs)
    shapes = ("x".join(map(str, leaf.shape)) or "scalar" for leaf in leaves)
    return ", ".join(dict.fromkeys(shapes)) or "no tensors"
