"""How often each operator runs in a step, exactly.

A region runs the operators of its forward once more, except those behind the last that
saves a tensor: there the recompute stops. So a region that ends in a matrix product
does not repeat that product, because a product saves its inputs before it runs. Where
regions are nested, what lies k regions deep runs k times more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import membudget as mb
from tests.oracles import CountedOperators

Function = Callable[[Tensor], Tensor]

BATCH, WIDTH = 3, 4
PRODUCT = 2 * BATCH * WIDTH * WIDTH  # The flops of one product of `_layers`.


def _counts(step: Callable[[], object]) -> Counter[str]:
    with CountedOperators() as counting:
        step()
    return counting.counts


def _input() -> Tensor:
    return torch.randn(BATCH, WIDTH, requires_grad=True)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def _chain(functions: Sequence[Function], **options: Any) -> Function:
    def run(x: Tensor) -> Tensor:
        for function in functions:
            x = mb.checkpoint(function, x, **options)
        return x

    return run


def test_the_last_product_of_a_region_is_not_repeated() -> None:
    layers, x = _layers(), _input()

    counts = _counts(lambda: mb.checkpoint(layers, x).sum().backward())

    assert (counts["addmm"], counts["gelu"]) == (3, 2)


def test_without_early_stop_every_operator_is_repeated() -> None:
    layers, x = _layers(), _input()

    counts = _counts(
        lambda: mb.checkpoint(layers, x, early_stop=False).sum().backward()
    )

    assert (counts["addmm"], counts["gelu"]) == (4, 2)


def test_each_of_twelve_regions_is_repeated_once() -> None:
    blocks, x = [_layers() for _ in range(12)], _input()

    counts = _counts(lambda: _chain(blocks)(x).sum().backward())

    assert (counts["addmm"], counts["gelu"]) == (36, 24)


def test_the_backward_of_a_region_adds_its_forward_and_nothing_else() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return layer(x).exp()  # It saves its output, so all of the region is needed.

    with torch.no_grad():
        forward = _counts(lambda: function(x))
    plain = _counts(lambda: function(x).sum().backward())
    layer.zero_grad()  # Gradients that are there already would be added to.
    x.grad = None
    regions = _counts(lambda: mb.checkpoint(function, x).sum().backward())

    assert regions - plain == forward
    assert plain - regions == Counter()


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_what_lies_k_regions_deep_runs_k_times_more(depth: int) -> None:
    marks: list[Any] = [F.gelu, F.silu, F.mish, F.softplus, F.tanh]

    def level(k: int, x: Tensor) -> Tensor:
        x = marks[k](x)
        if k + 1 < depth:
            x = mb.checkpoint(level, k + 1, x)
        return x.exp()  # It saves its output, so all that is before it is needed.

    x = _input()
    counts = _counts(lambda: mb.checkpoint(level, 0, x).sum().backward())

    names = [mark.__name__ for mark in marks]
    assert [counts[name] for name in names[:depth]] == list(range(2, depth + 2))


def test_a_region_directly_in_a_region_runs_once_more_in_all() -> None:
    # The outer region saves the inner one's input alone, so its recompute stops there.
    x = _input()
    calls: list[None] = []

    def function(x: Tensor) -> Tensor:
        calls.append(None)
        return x.sin().exp()

    mb.checkpoint(lambda x: mb.checkpoint(function, x), x).sum().backward()

    assert len(calls) == 2


def test_where_nothing_is_saved_nothing_is_repeated() -> None:
    x = _input()

    counts = _counts(
        lambda: mb.checkpoint(lambda x: (x + 1).t() - 3, x).sum().backward()
    )

    assert (counts["add"], counts["sub"]) == (1, 1)


def test_a_region_that_the_loss_does_not_need_is_not_repeated() -> None:
    x = _input()

    def step() -> None:
        mb.checkpoint(lambda x: x.sin().exp(), x)
        mb.checkpoint(lambda x: x.tanh(), x).sum().backward()

    counts = _counts(step)

    assert (counts["sin"], counts["exp"], counts["tanh"]) == (1, 1, 2)


def test_a_recompute_stops_at_the_last_tensor_that_still_lives() -> None:
    # Of two branches one is dropped: its saved tensors die with its output.
    x = _input()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.tanh(), y.erf().sigmoid()

    counts = _counts(lambda: mb.checkpoint(two, x)[0].sum().backward())

    assert (counts["tanh"], counts["erf"], counts["sigmoid"]) == (2, 1, 1)


@pytest.mark.parametrize(("shared", "recomputes"), [(False, 3), (True, 1)])
def test_three_backwards_recompute_thrice_or_once_in_a_group(
    shared: bool, recomputes: int
) -> None:
    x = _input()

    def step() -> None:
        y = mb.checkpoint(lambda x: x.erf().exp(), x)
        for i in range(3):
            y[i].sum().backward(retain_graph=i < 2)

    def grouped() -> None:
        with mb.execution_group():
            step()

    counts = _counts(grouped if shared else step)

    assert counts["erf"] == 1 + recomputes


def _flops(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counting:
        step()
    return counting.get_total_flops()


@pytest.mark.parametrize(
    ("run", "products"),
    [
        # Two forward, and two for each in the backward.
        pytest.param(lambda layers, x: layers(x), 6, id="plain"),
        pytest.param(lambda layers, x: mb.checkpoint(layers, x), 7, id="one region"),
        pytest.param(
            lambda layers, x: mb.checkpoint(layers, x, early_stop=False),
            8,
            id="without early stop",
        ),
        # The first region ends in GELU, which needs its product; the second in a
        # product, which it does not repeat.
        pytest.param(
            lambda layers, x: _chain([layers[:2], layers[2]])(x), 7, id="two regions"
        ),
        # Each region is one product, which saves its input alone.
        pytest.param(lambda layers, x: _chain(layers)(x), 6, id="each layer"),
        pytest.param(
            lambda layers, x: mb.checkpoint_sequential(layers, 3, x),
            6,
            id="sequential",
        ),
        pytest.param(
            lambda layers, x: mb.checkpoint(_chain(layers), x), 7, id="nested"
        ),
    ],
)
def test_flops_of_a_step(
    run: Callable[[nn.Sequential, Tensor], Tensor], products: int
) -> None:
    layers, x = _layers(), _input()

    flops = _flops(lambda: run(layers, x).sum().backward())

    assert flops == products * PRODUCT
