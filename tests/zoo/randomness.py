"""Cases that draw random numbers, from every source that a region may reach."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import devices
from tests.zoo.case import Call, case, leaf


@case()
def dropout() -> Call:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 6))
    return Call(model, (leaf(5, 6),))


@case()
def several_random_operators() -> Call:
    def function(x: Tensor) -> Tensor:
        x = x * torch.rand_like(x) + torch.randn(6)
        x = x[torch.randperm(5)] * torch.bernoulli(torch.full((5, 6), 0.7))
        return (x * torch.empty(5, 6).normal_()).sin() * torch.randint(1, 9, (6,))

    return Call(function, (leaf(5, 6),))


# torch brings back the streams of the devices of the arguments, of which emu:1 is none.
@case(torch_on_emu="wrong")
def reseeding_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5).exp()
        torch.manual_seed(3)
        return F.dropout(x, 0.5).sin()

    return Call(function, (leaf(5, 6),))


@case()
def sampling() -> Call:
    def function(x: Tensor) -> Tensor:
        chosen = torch.multinomial(x.softmax(-1), 2)
        return x.gather(1, chosen).sin() * F.gumbel_softmax(x)[:, :2]

    return Call(function, (leaf(5, 6),))


@case(torch="wrong")
def python_reseeded_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        x = (x * random.random()).sin()
        random.seed(4)
        return (x * random.random()).sin()

    return Call(function, (leaf(5, 6),))


class _Noise(nn.Module):
    """Multiply by noise from a generator that the module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = devices.generator().manual_seed(11)

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rand(x.shape, generator=self.generator)).sin()


@case(torch="wrong")
def generator_as_attribute() -> Call:
    model = _Noise()
    return Call(model, (leaf(5, 6),), state={"generator": model.generator})


@case(torch="wrong")
def generator_closed_over() -> Call:
    generator = devices.generator().manual_seed(11)

    def function(x: Tensor) -> Tensor:
        return (x * torch.rand(5, 6, generator=generator)).sin()

    return Call(function, (leaf(5, 6),), state={"generator": generator})


@case(torch="wrong")
def generators_in_a_list() -> Call:
    generators = [devices.generator().manual_seed(seed) for seed in (11, 12)]

    def function(x: Tensor) -> Tensor:
        for generator in generators:
            x = (x * torch.rand(5, 6, generator=generator)).sin()
        return x

    return Call(function, (leaf(5, 6),), state={"generators": generators})


@case(torch="wrong")
def generator_as_argument() -> Call:
    generator = devices.generator().manual_seed(11)

    def function(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x * torch.rand(5, 6, generator=generator)).sin()

    return Call(function, (leaf(5, 6), generator), state={"generator": generator})


@case(torch="wrong")
def python_random_branch() -> Call:
    fully = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def function(x: Tensor) -> Tensor:
        for i in range(0, 8, 2):
            x = fully[i + (random.random() < 0.5)](x).tanh()
        return x

    return Call(function, (leaf(5, 6),), state={"layers": fully})


@case(torch="wrong")
def python_random_factor() -> Call:
    def function(x: Tensor) -> Tensor:
        return (x * random.gauss(1.0, 0.5)).sin() * random.choice([2.0, 3.0, 5.0])

    return Call(function, (leaf(5, 6),))


@case(torch="wrong")
def private_python_random() -> Call:
    stream = random.Random(5)

    def function(x: Tensor) -> Tensor:
        return (x * stream.random()).sin()

    return Call(function, (leaf(5, 6),), state={"stream": stream})


@case(torch="wrong")
def numpy_noise() -> Call:
    def function(x: Tensor) -> Tensor:
        noise = np.random.standard_normal((5, 6))  # noqa: NPY002 - the global stream
        return (x * torch.from_numpy(noise).to(x)).sin()

    return Call(function, (leaf(5, 6),))


@case(torch="wrong")
def private_numpy_generator() -> Call:
    stream = np.random.default_rng(5)

    def function(x: Tensor) -> Tensor:
        return (x * torch.from_numpy(stream.random((5, 6))).to(x)).sin()

    return Call(function, (leaf(5, 6),), state={"stream": stream})


@case(torch="wrong")
def rrelu_in_training() -> Call:
    # The operator saves its noise before it has drawn it; a recompute that stops at
    # that moment hands out memory that nobody has filled.
    model = nn.Sequential(nn.Linear(6, 6), nn.RReLU(0.1, 0.9))
    return Call(model, (leaf(50, 6),))


@case(torch="wrong")
def noise_of_five_sources() -> Call:
    generator = devices.generator().manual_seed(11)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))

    def function(x: Tensor) -> Tensor:
        x = model(x) * (random.random() + np.random.random())  # noqa: NPY002
        x = x + torch.randn(5, 6, generator=generator)
        return F.dropout(x.sin(), 0.5) * random.uniform(1, 2)

    return Call(function, (leaf(5, 6),), state={"model": model, "generator": generator})
