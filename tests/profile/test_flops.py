"""Operations and bytes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from membudget.profile import profile
from tests.profile.cases import each, plain_step, seed

FAKE = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])


def flops_by_name(model: nn.Module, batch: Any, fake: bool) -> dict[str, int]:
    graph = profile(model, batch, fake=fake, device="h100").graph
    found: dict[str, int] = {}
    for operator in graph.operators:
        if operator.flops:
            name = operator.name.split(".")[1]
            found[name] = found.get(name, 0) + operator.flops
    return found


class Function(nn.Module):
    """A function of tensors that all require a gradient."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def leaves(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, requires_grad=True) for s in shapes)


@FAKE
def test_a_linear_layer_takes_three_products(fake):
    model, x = nn.Linear(8, 16), torch.randn(5, 8, requires_grad=True)
    product = 2 * 5 * 8 * 16

    assert flops_by_name(model, x, fake) == {"addmm": product, "mm": 2 * product}


@FAKE
def test_products_of_matrices_and_batches_are_exact(fake):
    mm = flops_by_name(Function(torch.mm), leaves((3, 4), (4, 5)), fake)
    bmm = flops_by_name(Function(torch.bmm), leaves((2, 3, 4), (2, 4, 5)), fake)

    assert mm == {"mm": 3 * 2 * 3 * 4 * 5}
    assert bmm == {"bmm": 3 * 2 * 2 * 3 * 4 * 5}


@FAKE
@pytest.mark.parametrize(
    ("model", "product"),
    [
        # Each of 2·6·6·5 outputs sums over 2 of the 4 channels, or over one.
        (nn.Conv2d(4, 6, 3, groups=2), 2 * (2 * 6 * 6 * 5) * (2 * 3 * 3)),
        (nn.Conv2d(4, 8, 3, groups=4), 2 * (2 * 8 * 6 * 5) * (1 * 3 * 3)),
        # Each of 2·4·8·7 inputs goes into 3 of the 6 channels.
        (nn.ConvTranspose2d(4, 6, 3, groups=2), 2 * (2 * 4 * 8 * 7) * (3 * 3 * 3)),
    ],
    ids=["two groups", "a group per channel", "transposed"],
)
def test_a_grouped_convolution_is_exact(model, product, fake):
    x = torch.randn(2, 4, 8, 7, requires_grad=True)

    found = flops_by_name(model, x, fake)

    assert found == {"convolution": product, "convolution_backward": 2 * product}


def test_the_weight_of_a_convolution_of_groups_takes_one_product():
    model = nn.Conv2d(4, 6, 3, groups=2)

    found = flops_by_name(model, torch.randn(2, 4, 8, 7), fake=True)

    assert found["convolution_backward"] == found["convolution"]


@FAKE
def test_a_convolution_is_exact(fake):
    model = nn.Conv2d(4, 6, 3, bias=False)
    x = torch.randn(2, 4, 8, 7, requires_grad=True)
    product = 2 * (2 * 6 * 6 * 5) * (4 * 3 * 3)

    found = flops_by_name(model, x, fake)

    assert found == {"convolution": product, "convolution_backward": 2 * product}


@pytest.mark.cpu_only("emu composes attention of products")
@FAKE
def test_attention_is_exact_forward_and_backward(fake):
    b, h, s, t, d = 2, 3, 5, 7, 4
    qkv = leaves((b, h, s, d), (b, h, t, d), (b, h, t, d))

    found = flops_by_name(Function(F.scaled_dot_product_attention), qkv, fake)

    product = 2 * b * h * s * t * d
    forward, backward = found.values()
    assert forward == 2 * product
    # The scores again, and two gradients of each of the two products.
    assert backward == 5 * product


@pytest.mark.cpu_only("emu's LSTM goes by cells: its first state needs no gradient")
@FAKE
def test_an_lstm_is_exact(fake):
    length, batch, inputs, hidden = 5, 3, 6, 4
    model = nn.LSTM(inputs, hidden)
    x = torch.randn(length, batch, inputs, requires_grad=True)

    found = flops_by_name(model, x, fake)

    products = 2 * length * batch * 4 * hidden * (inputs + hidden)
    assert sum(found.values()) == 3 * products


UNCOUNTED = (
    *("recurrent", "attention", "tied_embeddings", "transformer", "checkpoint"),
    "convolutions",  # Of groups: torch counts the weight's gradient once for each.
)


@pytest.mark.parametrize("make", each(*UNCOUNTED))
def test_the_sum_is_that_of_torch_s_counter(make):
    seed()
    model, batch = make()
    with FlopCounterMode(display=False) as counter:
        plain_step(model, batch)
    model.zero_grad()

    found = profile(model, batch, fake=False, device="h100").graph.flops

    assert found == counter.get_total_flops()


@FAKE
def test_bytes_are_those_of_the_operands_each_storage_once(fake):
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = x * x  # One storage, read twice.
        z = z + y[:2].expand(3, 2)
        return torch.cat([z, z]).sum()

    graph = profile(
        Function(function), leaves((3, 2), (10,)), fake=fake, device="h100"
    ).graph

    moved = [
        (o.name.split(".")[1], o.read_bytes, o.written_bytes)
        for o in graph.operators[: graph.backward_start]
    ]
    assert moved == [
        ("mul", 24, 24),
        ("slice", 0, 0),
        ("expand", 0, 0),
        ("add", 32, 24),
        ("cat", 24, 48),
        ("sum", 48, 4),
    ]
