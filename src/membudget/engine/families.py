"""Sort classes into families: what instances of one hold, and so how a walk goes on.

A family is named by a class: `list` stands for every container, `object` for objects
whose attributes may hold anything, and `Opaque` for those that hold no user state.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from membudget._torch import torchscript_types
from membudget.state.packages import is_library

# Types whose values reference no user state; so frequent that they are skipped first.
INERT = frozenset(
    (
        *(int, float, bool, complex, str, bytes, type(None), type, range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, types.ModuleType),
        *(types.BuiltinFunctionType, types.MethodWrapperType, type(Tensor.sin)),
    )
)


class Opaque:
    """The family of what holds no user state: classes, instances of library classes."""


class Scripted:
    """The family of traced and scripted code."""


class Uninitialised:
    """The family of the parameters and buffers of lazy modules."""


# In this order: an uninitialised parameter is a tensor, a scripted module a module.
_FAMILIES: dict[type, tuple[type, ...]] = {
    Uninitialised: (UninitializedParameter, UninitializedBuffer),
    Tensor: (Tensor,),
    Scripted: torchscript_types,
    Module: (Module,),
    torch.Generator: (torch.Generator, random.Random),
    list: (list, tuple, set, dict, deque),
    functools.partial: (functools.partial,),
    types.FunctionType: (types.FunctionType,),
    types.MethodType: (types.MethodType,),
    object: (types.SimpleNamespace,),
    Opaque: (type,),
}


@functools.cache
def family_of(kind: type) -> type:
    """Return the family of a class."""
    if issubclass(kind, _numpy_generators()):
        return torch.Generator
    for family, members in _FAMILIES.items():
        if issubclass(kind, members):
            return family
    return Opaque if kind in INERT or is_library(kind.__module__) else object


def _numpy_generators() -> tuple[type, ...]:
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return ()
    return numpy_random.Generator, numpy_random.RandomState
