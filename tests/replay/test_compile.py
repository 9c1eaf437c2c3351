"""Replay regions around compiled code, and inside it.

Around: what a compiled graph runs is recorded like anything else, or held where it is
one kernel. Inside: `torch.compile` makes its own plan; `keep` says what is kept in it
(row A12); the other options of the replay engine do not reach it.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.steps import Block, Region, differences, plain, region_with
from tests.compiled import MARKS, every_backend, leaf, smooth
from tests.keeps import VERIFIES

pytestmark = MARKS

KEEPS = {
    "nothing": mb.policies.nothing,
    "matmuls": mb.policies.matmuls,
    "everything": mb.policies.everything,
}
# Each keep-set and each way to verify; their whole product is slow.
every_region = pytest.mark.parametrize(
    "region",
    [
        pytest.param(
            region_with(engine="replay", keep=keep, verify=verify),
            id=f"{name}-{verify}",
            marks=pytest.mark.slow if name == "matmuls" and verify else (),
        )
        for (name, keep), verify in itertools.product(KEEPS.items(), VERIFIES)
        if not (name == "everything" and verify)
    ],
)


def perceptron(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 5), nn.GELU(), nn.Dropout(dropout), nn.Linear(5, 3)
    )


@every_region
@every_backend
def test_a_compiled_module_is_a_region(region: Region, backend: str) -> None:
    def step(region: Region) -> Any:
        model = perceptron(dropout=0.3)
        compiled = torch.compile(model, backend=backend)
        x = leaf()
        y = region(compiled, x)
        (region(compiled, y) + y).sum().backward()
        return model, x, y

    assert differences(step, region) == []


@every_region
@every_backend
def test_a_region_with_a_compiled_submodule_equals_the_uncompiled_run(
    region: Region, backend: str
) -> None:
    def step(region: Region) -> Any:
        block, x = Block(dropout=0.3), torch.randn(2, 5, 8, requires_grad=True)
        if region is not plain:
            block.attention.compile(backend=backend)
            block.up.compile(backend=backend)
        for _ in range(2):
            region(block, region(block, x)).square().sum().backward()
        return block, x

    assert differences(step, region) == []


@every_region
@every_backend
def test_the_submodule_is_compiled_and_not_run_as_it_is(
    region: Region, backend: str
) -> None:
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    model = perceptron()
    compiled = torch.compile(model, backend=compiler)

    region(lambda x: compiled(x.sin()), leaf()).sum().backward()

    assert len(graphs) == 1


@every_region
@every_backend
def test_a_graph_break_in_a_region_changes_nothing(
    region: Region, backend: str
) -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(dropout=0.3), leaf()

        def broken(x: Tensor) -> Tensor:
            y = model(x.exp())
            torch._dynamo.graph_break()
            return model(y.sin())

        function = broken if region is plain else torch.compile(broken, backend=backend)
        y = region(function, x)
        y.sum().backward()
        return model, x, y

    assert differences(step, region) == []


@every_region
@every_backend
def test_sizes_that_vary_change_nothing(region: Region, backend: str) -> None:
    def step(region: Region) -> Any:
        function = smooth if region is plain else torch.compile(smooth, backend=backend)
        inputs = [leaf(rows) for rows in (2, 3, 4, 5)]
        outputs = [region(lambda x: function(x.cos()), x) for x in inputs]
        for y in outputs:
            y.sum().backward()
        return inputs, outputs

    assert differences(step, region) == []


@every_region
@every_backend
def test_a_region_runs_inside_a_compiled_function(region: Region, backend: str) -> None:
    def step(region: Region) -> Any:
        inner = perceptron()

        def run(x: Tensor) -> Tensor:
            y: Tensor = region(inner, x.cos()).sin()
            return region(inner, y)

        inputs = [leaf(), leaf(), leaf(4)]
        function = run if region is plain else torch.compile(run, backend=backend)
        outputs = [function(x) for x in inputs]
        for y in outputs:
            y.sum().backward()
        return inner, inputs, outputs

    assert differences(step, region) == []


@every_region
@pytest.mark.cpu_only("torch's compiler replays no draw of a backend that plugs in")
def test_dropout_comes_back_inside_compiled_code(region: Region) -> None:
    def step(region: Region) -> Any:
        inner, x = perceptron(dropout=0.3), leaf(20)

        def run(x: Tensor) -> Tensor:
            y: Tensor = region(inner, x)
            return y.sin()

        # Not `eager`, with which torch 2.13 draws another mask in its recompute.
        function = run if region is plain else torch.compile(run, backend="aot_eager")
        y = function(x)
        y.sum().backward()
        return inner, x, y

    assert differences(step, region) == []


@every_backend
@pytest.mark.parametrize("keep", KEEPS)
def test_a_model_with_applied_regions_is_compiled(backend: str, keep: str) -> None:
    def step(region: Region) -> Any:
        layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
        model: Any = nn.Sequential(*layers)
        x = leaf()
        if region is plain:
            y = model(x)
        else:
            mb.apply(model, names="*", engine="replay", keep=KEEPS[keep])
            y = torch.compile(model, backend=backend)(x)
        y.square().sum().backward()
        return list(model.parameters()), x, y

    assert differences(step, region_with(engine="replay")) == []


@every_backend
def test_one_region_runs_plain_and_inside_compiled_code_in_turn(backend: str) -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), leaf()
        applied = None
        if region is not plain:
            applied = mb.apply(model, blocks=nn.Linear, engine="replay")
        compiled = torch.compile(model, backend=backend)
        for run in (model, compiled, model, compiled):
            (model if region is plain else run)(x).sum().backward()
        if applied is not None:
            applied.remove()
        return model, x

    assert differences(step, region_with(engine="replay")) == []
