"""Cases about what goes in and what comes out: structures, keywords, frozen inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.case import Call, case, leaf

_HIDDEN = "tensors that require a gradient are not positional arguments"
_NO_INPUT = "no positional tensor requires a gradient"
_STRUCTURE = "the output is neither a tensor nor a tuple or list of tensors"


@dataclass
class Pair:
    """Two tensors and a number."""

    left: Tensor
    right: Tensor
    scale: float = 2.0


class Named(NamedTuple):
    """A tensor and its mask."""

    value: Tensor
    mask: Tensor


@case(not_reentrant=_HIDDEN)
def dict_in_and_out() -> Call:
    def function(batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"].sin() * batch["inner"]["y"]
        return {"sum": x + batch["bias"], "inner": {"product": x.exp()}, "label": "a"}

    batch = {"x": leaf(5, 6), "inner": {"y": leaf(6)}, "bias": 1.5}
    return Call(function, (batch,))


@case()
def tuple_out() -> Call:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.sin() * y
        return z.exp(), z.cos()

    return Call(function, (leaf(5, 6), leaf(6)))


@case(not_reentrant=_HIDDEN)
def dataclass_in_and_out() -> Call:
    def function(pair: Pair) -> Pair:
        return Pair(pair.left.sin() * pair.scale, pair.left.cos() * pair.right)

    return Call(function, (Pair(leaf(5, 6), leaf(6), 3.0),))


@case(not_reentrant=_HIDDEN)
def namedtuple_in_and_out() -> Call:
    def function(named: Named) -> Named:
        value = named.value.exp() * named.mask
        return Named(value.sin(), named.mask)

    return Call(function, (Named(leaf(5, 6), torch.rand(5, 6) < 0.5),))


@case(not_reentrant=_HIDDEN)
def keyword_tensors() -> Call:
    def function(x: Tensor, *, mask: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).masked_fill(mask, 0.5).sin()

    mask = torch.rand(5, 6) < 0.5
    return Call(function, (leaf(5, 6),), {"mask": mask, "scale": leaf(6)})


@case()
def frozen_keyword_tensors() -> Call:
    def function(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).tanh()

    angle = torch.rand(5, 3)
    return Call(function, (leaf(5, 6),), {"cos": angle.cos(), "sin": angle.sin()})


@case(not_reentrant=_HIDDEN)
def tensors_nested_in_lists_and_dicts() -> Call:
    def function(x: Tensor, extra: list[Any]) -> Tensor:
        return (x * extra[0]["w"]).sin() + (extra[1][0] * extra[1][1]).exp()

    extra = [{"w": leaf(6)}, (leaf(5, 6), leaf(5, 1))]
    return Call(function, (leaf(5, 6), extra))


@case()
def closure_tensors() -> Call:
    weight, frozen = leaf(6, 6), torch.randn(6)

    def function(x: Tensor) -> Tensor:
        return (x @ weight).sin() * frozen

    return Call(function, (leaf(5, 6),), state={"weight": weight})


@case(not_reentrant=_NO_INPUT)
def frozen_input() -> Call:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    return Call(model, (torch.randn(5, 6),))


@case(not_reentrant=_NO_INPUT)
def no_arguments() -> Call:
    weight = leaf(5, 6)
    return Call(lambda: weight.sin().exp(), state={"weight": weight})


@case(not_reentrant=_NO_INPUT)
def integer_input() -> Call:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Tanh())
    return Call(model, (torch.randint(9, (5,)),))


@case(
    not_reentrant="no gradient would reach what it puts into the list",
    torch="raises",
    torch_says="different metadata",
)
def list_that_is_appended_to() -> Call:
    key = nn.Linear(6, 6)

    def function(x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(key(x))
        keys = torch.cat(cache)
        return (x @ keys.T).softmax(-1) @ keys

    past = [torch.randn(3, 6)]
    return Call(function, (leaf(5, 6), past), state={"key": key})


@case(
    not_twice="the first call empties the dict",
    torch="raises",
    torch_says="scale",
)
def dict_that_is_consumed() -> Call:
    def function(x: Tensor, options: dict[str, float]) -> Tensor:
        return (x * options.pop("scale")).sin()

    return Call(function, (leaf(5, 6), {"scale": 2.0}))


@case()
def branch_on_data() -> Call:
    def function(x: Tensor) -> Tensor:
        return x.sin() * 2 if bool(x.sum() > 0) else x.exp().cos()

    return Call(function, (leaf(5, 6),))


@case()
def branch_on_item() -> Call:
    def function(x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max().item() * 2) % 3 + 1):
            x = (x * 1.5).sin()
        return x

    return Call(function, (leaf(5, 6),))


@case()
def one_of_several_outputs_used() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y.exp(), y.cos().exp(), (x * y).tanh()

    return Call(function, (leaf(5, 6),), used=lambda outputs: outputs[1])


@case(not_reentrant=_STRUCTURE)
def tensor_returned_twice_and_others() -> Call:
    def function(x: Tensor, y: Tensor) -> list[Any]:
        z = (x * y).sin()
        return [z, z, x, None, "text", 3]

    return Call(function, (leaf(5, 6), leaf(6)))


@case()
def same_tensor_given_twice() -> Call:
    x = leaf(5, 6)
    return Call(lambda a, b: (a.sin() * b).exp(), (x, x))


@case()
def expanded_tensors() -> Call:
    def function(x: Tensor, row: Tensor) -> Tensor:
        return (x * row.expand(5, 6)).sin() * row.expand(3, 5, 6).exp()

    return Call(function, (leaf(5, 6), leaf(1, 6)))


@case(not_reentrant="an argument requires no gradient, and yet has a graph inside")
def scalars_of_other_precision() -> Call:
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    shift = nn.Parameter(torch.tensor(0.25, dtype=torch.float64))

    def function(x: Tensor) -> Tensor:
        return (x * scale).sin() * 2.0 + shift * x.double()

    return Call(function, (torch.randn(5, 6),), state={"scale": scale, "shift": shift})
