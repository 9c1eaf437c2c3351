"""Cases whose function keeps things on a module, or is handed a module or generator."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from tests import devices
from tests.zoo.case import Call, case, leaf


class _CallsCounted(nn.Module):
    """Count the calls in an attribute that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x * self.calls).sin()


@case(torch="wrong")
def counter_attribute_that_is_read() -> Call:
    model = _CallsCounted()
    return Call(model, (leaf(5, 6),), state={"calls": lambda: model.calls})


class _Recurrent(nn.Module):
    """Keep a hidden state from one call to the next, with its graph or without."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.hidden: Tensor | None = None
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.hidden is not None:
            hidden = hidden + self.hidden
        hidden = hidden.tanh()
        self.hidden = hidden.detach() if self.detached else hidden
        return hidden * hidden


@case(not_reentrant="what it keeps on the module has no graph", torch="wrong")
def hidden_state_with_graph() -> Call:
    model = _Recurrent(detached=False)
    return Call(model, (leaf(5, 6),), state={"hidden": lambda: model.hidden})


@case(torch="wrong")
def hidden_state_detached() -> Call:
    model = _Recurrent(detached=True)
    return Call(model, (leaf(5, 6),), state={"hidden": lambda: model.hidden})


@case()
def training_flag_switched_inside() -> Call:
    dropout = nn.Dropout(0.5)

    def function(x: Tensor) -> Tensor:
        dropout.eval()
        x = dropout(x).sin()
        dropout.train()
        return dropout(x).exp()

    return Call(function, (leaf(5, 6),), state={"mode": lambda: dropout.training})


@case()
def parameters_frozen_for_a_while() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        linear.requires_grad_(False)
        y = linear(x).sin()
        linear.requires_grad_(True)
        return y * linear(x).exp()

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@case(torch="wrong")
def module_as_argument() -> Call:
    def function(x: Tensor, norm: nn.Module) -> Tensor:
        return F.gelu(norm(x))

    return Call(function, (leaf(5, 6), nn.BatchNorm1d(6)))


@case(torch="wrong")
def module_in_a_nested_keyword() -> Call:
    def function(x: Tensor, layers: dict[str, list[nn.Module]]) -> Tensor:
        return F.gelu(layers["norms"][0](x))

    layers = {"norms": [nn.BatchNorm1d(6)]}
    return Call(function, (leaf(5, 6),), {"layers": layers})


@case(torch="wrong")
def generator_in_a_nested_argument() -> Call:
    def function(x: Tensor, given: dict[str, torch.Generator]) -> Tensor:
        return (x * torch.rand(5, 6, generator=given["noise"])).sin()

    given = {"noise": devices.generator().manual_seed(11)}
    return Call(function, (leaf(5, 6), given))


@case(torch="wrong")
def generator_in_a_partial() -> Call:
    def function(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x * torch.rand(5, 6, generator=generator)).sin()

    generator = devices.generator().manual_seed(11)
    return Call(
        functools.partial(function, generator=generator),
        (leaf(5, 6),),
        state={"generator": generator},
    )


class _Settings:
    """A plain object, with a generator two steps away."""

    def __init__(self) -> None:
        self.streams = {"noise": devices.generator().manual_seed(11)}


@case(torch="wrong")
def generator_in_a_plain_object() -> Call:
    settings = _Settings()

    def function(x: Tensor) -> Tensor:
        noise = settings.streams["noise"]
        return (x * torch.rand(5, 6, generator=noise)).sin()

    return Call(function, (leaf(5, 6),), state={"streams": settings.streams})


class _RegionsByMethod(nn.Module):
    """Make regions of its own methods, which can reach each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def inner(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()

    def outer(self, x: Tensor) -> Tensor:
        return mb.checkpoint(self.inner, x).exp()

    def forward(self, x: Tensor) -> Tensor:
        # The layer that follows the regions advances buffers that they can reach.
        return self.norm(mb.checkpoint(self.outer, x))


@case(torch="wrong")
def regions_that_reach_what_changes_later() -> Call:
    return Call(_RegionsByMethod(), (leaf(5, 6),))
