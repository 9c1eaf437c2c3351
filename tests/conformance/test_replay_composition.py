"""Replay regions in and around other regions equal the step without them, bit for bit.

A composition runs the layers of a model, some of them in a replay region. Its reference
is the same composition in which that region merely calls, and those of reruns, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb
from membudget.engine.options import Verify
from tests.keeps import BACKWARDS, KEEPS, QUICK, replay
from tests.oracles import StepResult, assert_same_step, run_step
from tests.zoo import Call, Case
from tests.zoo.case import leaf

Function = Callable[[Tensor], Tensor]
Region = Callable[[Function], Function]
Composition = Callable[[Region, list[Function], Tensor], Tensor]


class _Convolved(nn.Module):
    """Convolution, normalisation, an activation in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)), inplace=True)


def perceptron() -> Call:
    widths = [4, 6, 5, 4]
    layers = [
        nn.Sequential(nn.Linear(n, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, m))
        for n, m in pairwise(widths)
    ]
    return Call(nn.Sequential(*layers), (leaf(3, 4),))


def transformer() -> Call:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)

    return Call(nn.Sequential(block(), block(), block()), (leaf(2, 3, 8),))


def convolutions() -> Call:
    model = nn.Sequential(_Convolved(2), _Convolved(3), _Convolved(3))
    return Call(model, (leaf(2, 2, 5, 5),))


MODELS = [Case(make.__name__, make) for make in (perceptron, transformer, convolutions)]


def alone(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers
    return third(region(second)(first(x)))


def in_a_rerun(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers
    return mb.checkpoint(lambda x: third(region(second)(first(x))).sin(), x)


def around_a_rerun(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers
    return region(lambda x: third(mb.checkpoint(second, first(x))).sin())(x)


def in_a_rerun_in_a_replay(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers
    return region(
        lambda x: mb.checkpoint(lambda x: third(region(second)(first(x))).exp(), x)
    )(x)


def in_a_replay(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers
    return region(lambda x: third(region(second)(first(x))).sin())(x)


def directly_in_a_replay(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers
    return third(region(region(second))(region(first)(x)))


def in_the_checkpoint_of_torch(
    region: Region, layers: list[Function], x: Tensor
) -> Tensor:
    first, second, third = layers

    def function(x: Tensor) -> Tensor:
        return third(region(second)(first(x))).sin()

    return torch_checkpoint(function, x, use_reentrant=False)


def around_the_checkpoint_of_torch(
    region: Region, layers: list[Function], x: Tensor
) -> Tensor:
    first, second, third = layers

    def function(x: Tensor) -> Tensor:
        return third(torch_checkpoint(second, first(x), use_reentrant=False)).sin()

    return region(function)(x)


def in_an_offloader(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    with save_on_cpu():
        return alone(region, layers, x)


def around_an_offloader(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers

    def function(x: Tensor) -> Tensor:
        with save_on_cpu():
            y = second(first(x))
        return third(y).sin()

    return region(function)(x)


def around_a_gradient(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers

    def function(x: Tensor) -> Tensor:
        y = first(x)
        z = second(y)
        (gradient,) = torch.autograd.grad(z.sin().sum(), y, create_graph=True)
        return third(z) * gradient.square().mean()

    return region(function)(x)


def in_a_rerun_around_a_gradient(
    region: Region, layers: list[Function], x: Tensor
) -> Tensor:
    return mb.checkpoint(lambda x: around_a_gradient(region, layers, x).cos(), x)


def around_a_backward(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    first, second, third = layers

    def function(x: Tensor) -> Tensor:
        y = first(x).detach().requires_grad_()
        second(y).sin().sum().backward()
        assert y.grad is not None
        return third(second(first(x)) * y.grad.mean())

    return region(function)(x)


class _ScalesProducts(TorchDispatchMode):
    """A mode of the user's that computes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 1.25 if func in _PRODUCTS else output


_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.convolution.default)


def in_a_mode(region: Region, layers: list[Function], x: Tensor) -> Tensor:
    with _ScalesProducts():
        return in_a_replay(region, layers, x)


COMPOSITIONS: list[Composition] = [
    alone,
    in_a_rerun,
    around_a_rerun,
    in_a_rerun_in_a_replay,
    in_a_replay,
    directly_in_a_replay,
    in_the_checkpoint_of_torch,
    around_the_checkpoint_of_torch,
    in_an_offloader,
    around_an_offloader,
    around_a_gradient,
    in_a_rerun_around_a_gradient,
    around_a_backward,
    in_a_mode,
]


def composed(composition: Composition, region: Region, call: Call) -> Tensor:
    """Run the layers of a call's model in a composition."""
    return composition(region, list(call.function), *call.args)  # type: ignore[call-overload]


@functools.cache
def plain_step(model: Case, composition: Composition, backward: str) -> StepResult:
    """Return the step of a composition without any region of membudget's."""

    def way(call: Call) -> Tensor:
        with mb.disable_checkpointing():
            return composed(composition, lambda function: function, call)

    return run_step(model, way, BACKWARDS[backward])


# Each keep-set and each way to verify; their whole product is slow.
_KEEPS_AND_VERIFIES = [
    pytest.param(
        keep,
        verify,
        marks=() if verify is True or keep in QUICK else pytest.mark.slow,
    )
    for keep in KEEPS
    for verify in (True, "fingerprints")
]


@pytest.mark.parametrize(("keep", "verify"), _KEEPS_AND_VERIFIES)
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_composition_is_the_same_without_replay(
    model: Case, composition: Composition, keep: str, verify: Verify
) -> None:
    region = replay(KEEPS[keep], verify=verify)
    way = functools.partial(composed, composition, region)

    for backward in BACKWARDS:
        assert_same_step(
            plain_step(model, composition, backward),
            run_step(model, way, BACKWARDS[backward]),
        )


def in_segments(call: Call, **options: Any) -> Any:
    """Run the layers of a call's model under `checkpoint_sequential`."""
    model: Any = call.function
    return mb.checkpoint_sequential(model, 3, *call.args, **options)


def applied(call: Call, **options: Any) -> Any:
    """Run a call's model with a replay region on each layer."""
    model: Any = call.function
    regions = mb.apply(model, names="*", **options)
    try:
        return model(*call.args)
    finally:
        regions.remove()


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("way", [in_segments, applied])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_regions_over_a_whole_model_may_be_replayed(
    model: Case, way: Callable[..., Any], keep: str
) -> None:
    region = functools.partial(way, engine="replay", keep=KEEPS[keep])

    for backward in BACKWARDS:
        assert_same_step(
            plain_step(model, alone, backward),
            run_step(model, region, BACKWARDS[backward]),
        )
