"""Cases that draw random numbers, from every operator that takes a generator."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import devices
from tests.replay.registry import operators
from tests.zoo import Call
from tests.zoo.case import leaf


@operators()
def dropouts_of_every_kind() -> Call:
    def function(x: Tensor) -> Tensor:
        x = F.dropout(x.sin(), 0.3) * F.alpha_dropout(x, 0.2, training=True)
        x = F.dropout(x.exp() + 0, 0.5, inplace=True).view(1, 5, 2, 3)
        x = F.dropout2d(x.cos(), 0.4) * F.feature_alpha_dropout(x, 0.2, training=True)
        return nn.Dropout(0.0)(x).tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def numbers_that_are_drawn() -> Call:
    def function(x: Tensor) -> Tensor:
        x = (x * torch.rand(5, 6)).sin() + torch.randn_like(x) * x
        x = x[torch.randperm(5)].exp() * torch.randint(1, 9, (6,))
        x = x * torch.bernoulli(torch.full((5, 6), 0.7)) + torch.normal(x, 0.1)
        return (x * torch.normal(0.0, torch.rand(6))).cos()

    return Call(function, (leaf(5, 6),))


@operators()
def numbers_drawn_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        mask = torch.empty(5, 6).bernoulli_(0.5)
        y = x * mask + torch.zeros(5, 6).exponential_().log_()
        noise = torch.ones(5, 6)
        y = (y + noise).sin()
        noise.normal_().geometric_(0.5)
        noise[1:3].uniform_(-1, 1)
        return (y * noise).exp() * torch.empty(6).log_normal_().cauchy_().tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def leaky_noise() -> Call:
    def function(x: Tensor) -> Tensor:
        y = F.rrelu(x * 2, 0.1, 0.9, training=True).sin()
        return F.rrelu(y * 1, 0.2, 0.4, training=True, inplace=True).exp()

    return Call(function, (leaf(5, 6),))


@operators()
def samples() -> Call:
    def function(x: Tensor) -> Tensor:
        hard = F.gumbel_softmax(x, tau=0.7, hard=True)
        chosen = torch.multinomial(x.softmax(-1), 2)
        counts = torch.poisson(x.detach().exp())
        total = torch.binomial(torch.full((5, 6), 4.0), x.detach().sigmoid())
        soft = F.gumbel_softmax(x.sin()) * counts
        return x.gather(1, chosen).sin().sum() * hard + (soft * total).cos()

    return Call(function, (leaf(5, 6),))


@operators(not_double="torch has no second derivative of the gamma samples")
def distributions() -> Call:
    def function(x: Tensor) -> Tensor:
        gamma = torch.distributions.Gamma(x.exp(), x.sigmoid()).rsample()
        beta = torch.distributions.Dirichlet(x.exp()).rsample()
        normal = torch.distributions.Normal(x, x.exp()).rsample()
        return (gamma * beta).sin() * normal.tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def private_generators() -> Call:
    streams = [devices.generator().manual_seed(seed) for seed in (11, 12)]

    def function(x: Tensor) -> Tensor:
        for stream in streams:
            x = (x * torch.rand(5, 6, generator=stream)).sin()
            x = x + torch.empty(6).normal_(generator=stream) * x
            x = x * torch.bernoulli(torch.full((6,), 0.7), generator=stream)
        return x[torch.randperm(5, generator=streams[0])].exp()

    return Call(function, (leaf(5, 6),), state={"streams": streams})


@operators()
def generators_seeded_inside() -> Call:
    stream = devices.generator().manual_seed(11)

    def function(x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5).exp()
        torch.manual_seed(3)
        x = (F.dropout(x, 0.5) * torch.rand(6, generator=stream)).sin()
        state = stream.get_state()
        x = (x * torch.rand(6, generator=stream)).cos()
        stream.set_state(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            x = F.dropout(x.exp(), 0.5)
        return (x * torch.rand(6, generator=stream)).sin() * F.dropout(x, 0.5)

    return Call(function, (leaf(5, 6),), state={"stream": stream})


@operators()
def generator_born_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        stream = devices.generator().manual_seed(5)
        x = (x * torch.rand(5, 6, generator=stream)).sin()
        twin = devices.generator()
        twin.set_state(stream.get_state())
        del stream
        return (x * torch.rand(5, 6, generator=twin)).exp()

    return Call(function, (leaf(5, 6),))


@operators()
def numbers_of_python_and_numpy() -> Call:
    own, other = random.Random(5), np.random.default_rng(5)

    def function(x: Tensor) -> Tensor:
        x = (x * random.gauss(1.0, 0.5)).sin() * own.random()
        if random.random() < 0.5:
            x = x.exp()
        noise = np.random.standard_normal((5, 6))  # noqa: NPY002 - the global stream
        x = (x * torch.from_numpy(noise).to(x)).cos()
        order = list(range(5))
        own.shuffle(order)
        return (x[order] * torch.tensor(other.random(6)).float()).sin()

    return Call(function, (leaf(5, 6),), state={"own": own, "other": other})


@operators()
def pools_at_random_places() -> Call:
    def function(x: Tensor) -> Tensor:
        y = F.fractional_max_pool2d(x.sin(), 2, output_size=3)
        return y.exp() * F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5))

    return Call(function, (leaf(1, 2, 6, 6),))
