"""What is tried of a module: its samples, by type, layout and mode."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.devices import device_type
from tests.operators.database import copied
from tests.operators.variants import (
    Extent,
    Inputs,
    laid_out,
    name_of,
    small,
    some,
)
from tests.zoo import Call, Case

Made = tuple[nn.Module, Inputs]


def variants_of_module(info: Any, extent: Extent) -> Iterator[Case]:
    """Yield the variants of an entry of torch's module table."""
    for dtype, most in extent.samples.items():
        for training in (True, False) if info.train_and_eval_differ else (True,):
            mode = "" if training else "eval"
            try:
                found = _samples(info, dtype, training)
            except (NotImplementedError, RuntimeError):
                continue  # The module has no samples of this type.
            for number, index in enumerate(some(range(len(found)), most)):
                module, inputs = found[index]
                yield _case(name_of(dtype, mode, number), module, inputs)
            for number, (module, inputs) in enumerate(found[: extent.formed]):
                if in_place := _in_place(module):
                    name = name_of(dtype, mode, "in place", number)
                    yield _case(name, in_place, inputs)
            in_layouts = laid_out([inputs for _, inputs in found])
            for layout, (index, inputs) in in_layouts.items():
                yield _case(name_of(dtype, mode, layout), found[index][0], inputs)


def _case(name: str, module: nn.Module, inputs: Inputs) -> Case:
    def make() -> Call:
        args, kwargs = inputs
        return Call(copy.deepcopy(module), copied(args), copied(kwargs))

    return Case(name, make)


def _samples(info: Any, dtype: torch.dtype, training: bool) -> list[Made]:
    """Return modules, each with small inputs."""
    make = partial(info.module_inputs_func, info, device=device_type(), dtype=dtype)
    torch.manual_seed(0)
    found = []
    for sample in make(requires_grad=True, training=training):
        if (forward := sample.forward_input) is None:
            continue
        inputs = (forward.args, forward.kwargs)
        if small(inputs):
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).to(dtype)
            module.train(training)
            if info.is_lazy:
                module(*forward.args, **forward.kwargs)
            found.append((module, inputs))
    return found


class _Clone(nn.Module):
    """Give a module that works in place something to write into."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _in_place(module: nn.Module) -> nn.Module | None:
    if "inplace" not in inspect.signature(type(module)).parameters:
        return None
    in_place = copy.deepcopy(module)
    vars(in_place)["inplace"] = True
    return nn.Sequential(_Clone(), in_place)
