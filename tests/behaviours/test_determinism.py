"""Behaviours 78-81: a recompute that differs from its forward is noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.steps import Counted, Region, differences, region_with
from tests.devices import default_device

by_value = region_with(determinism_check="values")


class Changing:
    """A function that works on another tensor when it is run again."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            # Detached, so that the change itself saves nothing.
            x = self.change(x.detach()).requires_grad_()
        return x.exp().sin().sum()


class Counting:
    """A function that saves as many tensors as it is told for each of its calls."""

    def __init__(self, *saved: int) -> None:
        self.saved = list(saved)

    def __call__(self, x: Tensor) -> Tensor:
        for _ in range(self.saved.pop(0)):
            x = x.exp()
        return x


def leaf(*shape: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, torch.Size(shape or (6,)).numel()).reshape(
        shape or (6,)
    )


def mismatch(function: Callable[..., Any], **options: Any) -> mb.RecomputeMismatchError:
    """Return the error that the backward of a region raises."""
    x = leaf(2, 3).requires_grad_()
    loss = mb.checkpoint(function, x, **options).sum()
    with pytest.raises(mb.RecomputeMismatchError, match="did not repeat") as caught:
        loss.backward()
    assert x.grad is None
    return caught.value


@pytest.mark.parametrize("early_stop", [True, False])
def test_b78_fewer_tensors_are_detected(early_stop: bool) -> None:
    error = mismatch(Counting(3, 2), early_stop=early_stop)
    assert (error.index, error.saved, error.recomputed) == (
        None,
        "3 tensors",
        "2 tensors",
    )


def test_b78_no_tensors_at_all_are_detected() -> None:
    error = mismatch(Counting(3, 0))
    assert (error.saved, error.recomputed) == ("3 tensors", "0 tensors")


def test_b78_the_operator_is_the_users_under_a_default_device() -> None:
    class Taught(Changing):
        def __call__(self, x: Tensor) -> Tensor:
            with x.device:
                return super().__call__(x)

    error = mismatch(Taught(lambda x: x[:1]))
    assert ".exp()" in error.operator
    assert error.line.startswith("test_determinism.py:")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(lambda x: x[:1], "float32[1, 3]", id="shape"),
        pytest.param(lambda x: x.reshape(3, 2), "float32[3, 2]", id="same_bytes"),
        pytest.param(lambda x: x.double(), "float64[2, 3]", id="dtype"),
        pytest.param(lambda x: x.to("meta"), "meta", id="device"),
    ],
)
def test_b78_another_shape_dtype_or_device_is_detected(
    change: Callable[[Tensor], Tensor], named: str
) -> None:
    error = mismatch(Changing(change))
    assert error.index == 0
    assert f"float32[2, 3] on {default_device()}" in error.saved
    assert named in error.recomputed
    assert ".exp()" in error.operator
    assert error.line.startswith("test_determinism.py:")
    for fact in (error.saved, error.recomputed, error.operator, error.line):
        assert fact in str(error)


# torch 2.13 compares shape, dtype and device, and not the stride.
def test_b78_another_stride_is_detected() -> None:
    error = mismatch(Changing(lambda x: x.t().contiguous().t()))
    assert "stride (3, 1)" in error.saved
    assert "stride (1, 2)" in error.recomputed


def test_b78_the_module_is_named() -> None:
    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.change = Changing(lambda x: x[:1])

        def forward(self, x: Tensor) -> Tensor:
            return self.change(x)

    model = nn.Sequential(nn.Tanh(), nn.ModuleDict({"inner": Shrinking()})["inner"])
    error = mismatch(model)
    assert error.module_path == "1"
    assert "module '1'" in str(error)


def test_b78_a_mismatch_in_a_nested_region_is_detected() -> None:
    inner = Changing(lambda x: x[:1])

    def outer(x: Tensor) -> Tensor:
        y: Tensor = mb.checkpoint(inner, x.sin())
        return y

    mismatch(outer)


def test_b79_more_tensors_are_harmless_with_early_stop() -> None:
    x = leaf().requires_grad_()
    y = mb.checkpoint(Counting(2, 4), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(x.exp().exp().sum(), x)
    assert torch.equal(gradient, expected)


def test_b79_more_tensors_are_detected_without_early_stop() -> None:
    error = mismatch(Counting(2, 4), early_stop=False)
    assert error.saved == "2 tensors"


def test_b80_the_check_can_be_switched_off() -> None:
    function = Changing(lambda x: x.double())
    x = leaf().requires_grad_()
    mb.checkpoint(function, x, determinism_check="none").backward()
    assert function.calls == 2
    assert x.grad is not None


def test_b80_nothing_wrong_is_equal_without_the_check() -> None:
    def step(region: Region) -> Any:
        model, x = nn.Linear(6, 6), leaf().requires_grad_()
        region(lambda x: model(x).exp().sin(), x).sum().backward()
        return model, x

    assert differences(step, region_with(determinism_check="none")) == []


# torch 2.13 compares no values, and computes another gradient.
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x + 1, id="all"),
        pytest.param(lambda x: x * torch.tensor([1.0, 1.0, -1.0]), id="sign"),
        pytest.param(lambda x: x.flip(0), id="order"),
        pytest.param(lambda x: x.nextafter(torch.tensor(9.0)), id="last_bit"),
    ],
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_b81_other_values_of_the_same_shape_are_detected(
    change: Callable[[Tensor], Tensor], early_stop: bool
) -> None:
    error = mismatch(
        Changing(change), determinism_check="values", early_stop=early_stop
    )
    assert error.index == 0


# torch 2.13 neither replays Python's stream nor notices that it did not.
def test_b81_an_unrepeated_random_number_is_detected() -> None:
    source = random.SystemRandom()

    def noisy(x: Tensor) -> Tensor:
        return (x * source.random()).exp()

    mismatch(noisy, determinism_check="values")


# torch 2.13 compares no values. (Ours must not stop before it has compared the last.)
def test_b81_a_value_changed_in_the_last_saved_tensor_is_detected() -> None:
    function = Counted(lambda x: x)

    def last(x: Tensor) -> Tensor:
        y = function(x).sin()
        return (y + function.calls).exp()

    assert mismatch(last, determinism_check="values").index == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_b81_every_dtype_is_compared_by_value(dtype: torch.dtype) -> None:
    function = Counted(lambda x: x)

    def changing(x: Tensor) -> Tensor:
        return (function(x).to(dtype) * function.calls).exp().abs()

    mismatch(changing, determinism_check="values")


def test_b81_equal_values_pass() -> None:
    def step(region: Region) -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6))
        x = torch.randn(4, 6, requires_grad=True)
        region(model, x).exp().sum().backward()
        return model, x

    assert differences(step, by_value) == []


def test_b81_equal_values_that_no_number_equals_pass() -> None:
    def odd(x: Tensor) -> Tensor:
        infinite = (x.detach() / 0.0).requires_grad_()
        saved = torch.where(x > 0, x.log(), infinite) * x * -0.0
        return saved.exp() + x[:0].exp().sum() + (x.t() @ x.t().t()).exp().sum()

    x = leaf(2, 3).requires_grad_()
    y, reference = by_value(odd, x), odd(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(reference.sum(), x)
    assert reference.isnan().any()
    assert torch.equal(gradient.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_b81_integers_booleans_and_views_are_compared() -> None:
    def step(region: Region) -> Any:
        table = nn.Embedding(7, 4)
        index = torch.tensor([[1, 6], [0, 1]])

        def pick(index: Tensor) -> Tensor:
            rows = table(index).transpose(0, 1)[:, :1]
            return rows.masked_fill(rows > 0, 2.0).expand(2, 3, 4).exp().amax(-1)

        region(pick, index).sum().backward()
        return table

    assert differences(step, by_value) == []
