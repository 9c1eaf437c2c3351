"""What is tried of an operator: its samples in several types, layouts and forms.

Each variant is a case of `tests.zoo`: it builds one call with fresh inputs. A variant
need not make sense: what plain refuses is not tried under a region.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.devices import device_type
from tests.operators.database import DEVICE, DTYPES, copied
from tests.zoo import Call, Case

MOST_ELEMENTS = 20_000

Function = Callable[..., Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Extent:
    """How much of an operator is tried.

    Attributes:
        samples: How many samples of each type, at most.
        formed: How many of them in place and with `out=`, at most.
    """

    samples: dict[torch.dtype, int]
    formed: int


WHOLE = Extent(dict(zip(DTYPES, (6, 2, 2), strict=True)), formed=1)
SHARE = Extent({torch.float32: 3}, formed=1)


def variants_of(info: Any, extent: Extent) -> Iterator[Case]:
    """Yield the variants of an entry of torch's operator table."""
    for dtype, most in extent.samples.items():
        if not info.supports_dtype(dtype, DEVICE):
            continue
        samples = _samples(info, dtype)
        for number, inputs in enumerate(some(samples, most)):
            yield _case(name_of(dtype, number), info.op, inputs)
        for form, function in _forms(info).items():
            for number, inputs in enumerate(some(samples, extent.formed)):
                yield _case(name_of(dtype, form, number), function, inputs)
        if info.inplace_variant is not None:
            for number, inputs in enumerate(some(samples, extent.formed)):
                name = name_of(dtype, "in place on its argument", number)
                yield Case(name, partial(_writing, info.inplace_variant, inputs))
        for layout, (_, inputs) in laid_out(samples).items():
            yield _case(name_of(dtype, layout), info.op, inputs)


def name_of(dtype: torch.dtype, *words: object) -> str:
    """Return the name of a variant."""
    names = (str(dtype).removeprefix("torch."), *map(str, words))
    return " ".join(name for name in names if name)


def some(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, always the same ones.

    They are drawn, because a fixed stride may meet a pattern: of the samples of dropout
    every second one drops nothing.
    """
    if len(items) <= most:
        return list(items)
    drawn = random.Random(len(items)).sample(range(len(items)), most)
    return [items[index] for index in sorted(drawn)]


def _case(name: str, function: Function, inputs: Inputs) -> Case:
    args, kwargs = inputs
    # A function among the arguments is part of what is called.
    inner = {name: value for name, value in kwargs.items() if callable(value)}
    others = {name: value for name, value in kwargs.items() if name not in inner}
    called = partial(function, **inner) if inner else function
    return Case(name, lambda: Call(called, copied(args), copied(others)))


def _writing(operator: Function, inputs: Inputs) -> Call:
    """Let an operator write into a tensor that the caller has, and that has a graph."""
    (first, *others), kwargs = copied(inputs)
    return Call(operator, (first.clone(), *others), kwargs, state={"leaf": first})


def _samples(info: Any, dtype: torch.dtype) -> list[Inputs]:
    """Return the small ones among an operator's samples."""
    torch.manual_seed(0)
    samples = info.sample_inputs(device_type(), dtype, requires_grad=True)
    found = [((sample.input, *sample.args), sample.kwargs) for sample in samples]
    return [inputs for inputs in found if small(inputs)]


def small(inputs: Inputs) -> bool:
    """Return whether inputs have few elements."""
    return sum(tensor.numel() for tensor in _tensors(inputs)) <= MOST_ELEMENTS


def _tensors(values: Any) -> Iterable[Tensor]:
    return (x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))


def _forms(info: Any) -> dict[str, Function]:
    """Return the forms in which an operator can be called besides, by name."""
    forms: dict[str, Function] = {}
    if info.inplace_variant is not None:
        forms["in place"] = partial(_in_place, info.inplace_variant)
    if info.supports_out:
        forms["out="] = partial(_with_out, info.op)
    return forms


def _in_place(operator: Function, first: Tensor, *args: Any, **kwargs: Any) -> Any:
    return operator(first.clone(), *args, **kwargs)


def _with_out(operator: Function, *args: Any, **kwargs: Any) -> Any:
    """Use what the operator writes without a gradient, so that it is saved."""
    result = operator(*args, **kwargs)
    with torch.no_grad():
        out = pytree.tree_map(torch.empty_like, result)
        out = tuple(out) if isinstance(out, tuple) else out
        operator(*args, **kwargs, out=out)
    if isinstance(result, Tensor):
        return result * out
    return [a * b for a, b in zip(result, out, strict=True)]


# Layouts.


def laid_out(samples: list[Inputs]) -> dict[str, tuple[int, Inputs]]:
    """Return the first sample that each layout changes, with its number."""
    found: dict[str, tuple[int, Inputs]] = {}
    for layout, lay_out in LAYOUTS.items():
        for number, inputs in enumerate(samples):
            if any(_differs(tensor, lay_out(tensor)) for tensor in _tensors(inputs)):
                changed = pytree.tree_map_only(Tensor, lay_out, inputs)
                found[layout] = number, changed
                break
    return found


def _differs(tensor: Tensor, other: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return (tensor.shape, tensor.stride()) != (other.shape, other.stride())


def _like(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change the strided tensors; a changed one requires a gradient as before."""

    def changed(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    return changed


def _non_contiguous(tensor: Tensor) -> Tensor:
    """Take every second element of a larger tensor."""
    return torch.stack([tensor, tensor], -1)[..., 1]


def _channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return tensor
    return tensor.contiguous(memory_format=formats[tensor.dim()])


def _empty(tensor: Tensor) -> Tensor:
    return tensor[:0] if tensor.dim() else tensor


def _scalar(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[0] if tensor.numel() else tensor


LAYOUTS = {
    "non-contiguous": _like(_non_contiguous),
    "channels_last": _like(_channels_last),
    "empty": _like(_empty),
    "0-dim": _like(_scalar),
}
