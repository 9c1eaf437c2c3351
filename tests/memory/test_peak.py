"""The meter counts exactly, and the same each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.profiler import profile

import membudget as mb

FLOAT_BYTES = 4


def test_a_chain_needs_two_tensors_at_a_time():
    x = torch.zeros(1000)
    measured = mb.peak(lambda: x.sin().exp().sqrt().sum())
    assert measured.peak_bytes == 2 * x.nbytes
    assert measured.end_bytes == FLOAT_BYTES


def test_views_and_in_place_operators_take_nothing():
    x = torch.zeros(1000)
    measured = mb.peak(lambda: x.view(10, 100).t()[:5].neg_())
    assert measured.peak_bytes == 0
    assert measured.timeline == ()


def test_what_was_there_before_the_call_is_not_counted():
    held = [torch.zeros(1000)]
    measured = mb.peak(held.clear)
    assert measured.peak_bytes == 0
    assert measured.end_bytes == 0


def test_the_operator_at_the_peak_is_named():
    x = torch.zeros(100, 100)
    assert mb.peak(lambda: (x + 1).exp().sum()).operator == "aten::exp"


def test_a_backward_in_autograd_s_thread_is_counted():
    x = torch.zeros(1000, requires_grad=True)

    def step() -> None:
        x.sin().exp().sum().backward()

    # exp saves its output, and sin its input; the gradient of exp is made beside the
    # output, and the gradient of x beside that.
    first = mb.peak(step)
    assert first.end_bytes == x.nbytes
    x.grad = None
    assert mb.peak(step).peak_bytes == first.peak_bytes


def test_a_training_step_repeats_to_the_byte():
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, batch = nn.Sequential(*layers), torch.randn(8, 32)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad(set_to_none=True)

    peaks = {mb.peak(step).peak_bytes for _ in range(5)}
    assert len(peaks) == 1
    assert mb.peak(step).end_bytes == 0


def test_what_the_function_returns_is_handed_on():
    measured = mb.peak(lambda a, *, b: a + b, 1, b=2)
    assert measured.result == 3


def test_an_exception_passes_and_leaves_no_profiler_behind():
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mb.peak(fail)
    assert mb.peak(torch.zeros, 10).end_bytes == 40


def test_a_running_profiler_is_refused():
    with profile(), pytest.raises(mb.OptionError, match="a profiler is running"):
        mb.peak(torch.zeros, 10)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=30))
def test_the_peak_is_that_of_the_played_program(program):
    """Allocate a tensor, or free the oldest; the most held at once is the peak."""
    sizes: list[int] = []
    most = alive = 0
    for allocate, size in program:
        if allocate:
            sizes.append(size)
        elif sizes:
            sizes.pop(0)
        alive = sum(sizes) * FLOAT_BYTES
        most = max(most, alive)

    def run() -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for allocate, size in program:
            if allocate:
                tensors.append(torch.empty(size))
            elif tensors:
                tensors.pop(0)
        return tensors

    measured = mb.peak(run)
    assert measured.peak_bytes == most
    assert measured.end_bytes == alive


@pytest.mark.cuda
def test_the_allocator_of_a_cuda_device_is_asked():
    x = torch.zeros(1000, device="cuda")
    measured = mb.peak(lambda x: x.sin().exp(), x)
    assert measured.peak_bytes == 2 * x.nbytes
    assert measured.end_bytes == x.nbytes
