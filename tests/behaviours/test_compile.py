"""Behaviours 142-144: regions around compiled code, and inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.compat import create_selective_checkpoint_contexts
from tests.behaviours.steps import Counted, Region, differences, plain
from tests.compiled import MARKS, every_backend, leaf, smooth

pytestmark = MARKS


def gradients(run: Callable[[Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return value and gradient of `run` for each of the inputs."""
    found = []
    for x in inputs:
        y = run(x)
        found += [y.detach(), *torch.autograd.grad(y.sum(), x)]
    return found


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every_backend
def test_b142_a_compiled_function_runs_in_a_region(backend: str) -> None:
    compiled = torch.compile(smooth, backend=backend)
    function = Counted(lambda x: compiled(x.cos()).exp())
    inputs = [leaf(), leaf()]
    expected = gradients(function, *inputs)
    function.calls = 0
    found = gradients(lambda x: mb.checkpoint(function, x), *inputs)
    assert equal(found, expected)
    assert function.calls == 4


@every_backend
def test_b142_a_compiled_module_is_a_region(backend: str) -> None:
    def step(region: Region) -> Any:
        model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3))
        compiled = torch.compile(model, backend=backend)
        x = leaf()
        y = region(compiled, x)
        (region(compiled, y) + y).sum().backward()
        return model, x, y

    assert differences(step) == []


# The graph may be another in the recompute, where sizes have become dynamic in between
# (pytorch/pytorch#166926): then the saved tensors differ, and an error must say so.
@every_backend
def test_b142_sizes_that_vary_are_right_or_refused(backend: str) -> None:
    compiled = torch.compile(smooth, backend=backend)
    inputs = [leaf(rows) for rows in (2, 3, 4, 5)]
    expected = gradients(smooth, *inputs)
    outputs = [mb.checkpoint(compiled, x) for x in inputs]
    found = []
    for x, y in zip(inputs, outputs, strict=True):
        try:
            found += [y.detach(), *torch.autograd.grad(y.sum(), x)]
        except mb.RecomputeMismatchError:
            return
    assert equal(found, expected)


@every_backend
def test_b143_a_region_runs_inside_a_compiled_function(backend: str) -> None:
    @functools.partial(torch.compile, backend=backend)
    def compiled(x: Tensor) -> Tensor:
        return mb.checkpoint(smooth, x.cos()).exp()

    inputs = [leaf(), leaf(), leaf(4)]
    expected = gradients(lambda x: smooth(x.cos()).exp(), *inputs)
    assert equal(gradients(compiled, *inputs), expected)


@every_backend
def test_b143_a_region_over_a_module_runs_inside_compiled_code(backend: str) -> None:
    def step(region: Region) -> Any:
        inner = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3))

        def run(x: Tensor) -> Tensor:
            y: Tensor = region(inner, x).sin()
            return region(inner, y)

        x = leaf()
        y = (run if region is plain else torch.compile(run, backend=backend))(x)
        y.sum().backward()
        return inner, x, y

    assert differences(step) == []


@every_backend
def test_b143_a_model_with_regions_is_compiled(backend: str) -> None:
    def step(region: Region) -> Any:
        layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
        model: Any = nn.Sequential(*layers)
        x = leaf()
        if region is plain:
            y = model(x)
        else:
            mb.apply(model, names="*")
            y = torch.compile(model, backend=backend)(x)
        y.square().sum().backward()
        return list(model.parameters()), x, y

    assert differences(step) == []


def test_b143_a_compiled_function_with_a_graph_break_in_a_region_is_right() -> None:
    @functools.partial(torch.compile, backend="aot_eager")
    def compiled(x: Tensor) -> Tensor:
        def broken(x: Tensor) -> Tensor:
            y = x.exp()
            torch._dynamo.graph_break()
            return y.sin()

        return mb.checkpoint(broken, x).exp()

    expected = gradients(lambda x: x.exp().sin().exp(), leaf())
    assert equal(gradients(compiled, leaf()), expected)


def noisy(x: Tensor) -> Tensor:
    return F.dropout(x.exp(), 0.5).sin()


@pytest.mark.cpu_only("torch's compiler replays no draw of a backend that plugs in")
def test_b144_dropout_is_replayed_inside_compiled_code() -> None:
    def run(region: Region) -> Callable[[Tensor], Tensor]:
        return lambda x: region(noisy, x).exp()

    def step(region: Region) -> Any:
        function = run(region)
        if region is not plain:
            # Not `eager`, with which torch 2.13 draws another mask in its recompute.
            function = torch.compile(function, backend="aot_eager")
        return gradients(function, leaf(50))

    assert differences(step) == []


def test_b144_dropout_of_compiled_code_is_replayed_in_a_region() -> None:
    def step(region: Region) -> Any:
        function = noisy if region is plain else torch.compile(noisy, backend="eager")
        return gradients(lambda x: region(function, x).exp(), leaf(50))

    assert differences(step) == []


keep_products = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
)


def products(x: Tensor, sine: Callable[[Tensor], Tensor] = torch.sin) -> Tensor:
    return (sine(x @ x.t()) @ x).exp()


def test_b144_a_policy_is_right_inside_compiled_code() -> None:
    @functools.partial(torch.compile, backend="aot_eager")
    def compiled(x: Tensor) -> Tensor:
        return mb.checkpoint(products, x, context_fn=keep_products)

    assert equal(gradients(compiled, leaf()), gradients(products, leaf()))


def test_b144_a_policy_is_right_around_compiled_code() -> None:
    sine = torch.compile(torch.sin, backend="aot_eager")
    found = gradients(
        lambda x: mb.checkpoint(products, x, sine, context_fn=keep_products), leaf()
    )
    assert equal(found, gradients(products, leaf()))
