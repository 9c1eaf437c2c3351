"""What blocks cost: bytes exactly, and seconds that are there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from membudget.pipeline import measure_blocks

pytestmark = pytest.mark.cpu_only("counts bytes of the CPU")

ROWS, WIDTH = 64, 32
TENSOR_BYTES = ROWS * WIDTH * 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


def test_bytes_are_those_that_autograd_saves_and_the_output() -> None:
    # `tanh` saves its output; a region keeps that of its last one alone.
    blocks = [nn.Linear(WIDTH, WIDTH, bias=False), nn.Sequential(nn.Tanh(), nn.Tanh())]
    linear, tanh = measure_blocks(blocks, torch.randn(ROWS, WIDTH))
    assert (linear.saved_bytes, linear.kept_bytes) == (TENSOR_BYTES, TENSOR_BYTES)
    assert (tanh.saved_bytes, tanh.kept_bytes) == (2 * TENSOR_BYTES, TENSOR_BYTES)
    assert (linear.static_bytes, linear.gradient_bytes) == (WEIGHT_BYTES, WEIGHT_BYTES)
    assert (tanh.static_bytes, tanh.gradient_bytes) == (0, 0)
    assert linear.working_bytes >= WEIGHT_BYTES
    assert min(linear.forward_s, linear.backward_s) > 0


def test_states_of_the_optimizer_count_for_what_is_trained() -> None:
    block = nn.Linear(WIDTH, WIDTH)
    block.bias.requires_grad_(False)
    x, adam = torch.randn(ROWS, WIDTH), torch.optim.Adam
    (found,) = measure_blocks([block], x, optimizer=adam)
    steps_bytes = 4  # Adam counts its steps in a tensor of each parameter.
    assert found.static_bytes == 3 * WEIGHT_BYTES + WIDTH * 4 + steps_bytes


def test_the_first_block_may_take_numbers_without_gradients() -> None:
    blocks = [nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)]
    found = measure_blocks(blocks, torch.zeros(ROWS, dtype=torch.long))
    assert [one.saved_bytes for one in found] == [TENSOR_BYTES, TENSOR_BYTES]


def test_gradients_are_gone_afterwards() -> None:
    blocks = [nn.Linear(WIDTH, WIDTH)]
    measure_blocks(blocks, torch.randn(ROWS, WIDTH))
    assert all(parameter.grad is None for parameter in blocks[0].parameters())
