"""Row 24: the recompute runs in other surroundings than the forward did.

Modes, context variables, the choice of an attention kernel, the default dtype and
`module.training` change what a function computes, though nobody hands them over. By
the time of the backward the `with` block is left and the flag is turned.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    gradients,
    ours,
    plain,
    torch_fails,
    torch_rerun,
)

SCALE = contextvars.ContextVar("scale", default=1.0)


class CosForSinBelowAutograd(TorchDispatchMode):
    """Computes the cosine where the sine is asked for, below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        func = (
            torch.ops.aten.cos.default if func is torch.ops.aten.sin.default else func
        )
        return func(*args, **kwargs or {})


class CosForSin(TorchFunctionMode):
    """Computes the cosine where the sine is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **kwargs or {})


@contextlib.contextmanager
def scale_of_three() -> Iterator[None]:
    token = SCALE.set(3.0)
    yield
    SCALE.reset(token)


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Region(nn.Module):
    """Uses everything that a test changes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.first(x)) * SCALE.get()
        x = self.dropout(x)
        attended = nn.functional.scaled_dot_product_attention(x, x, x)
        # The default dtype decides in which precision the multiplication is done.
        return self.last((attended * torch.linspace(0, 1, 8)).float()).sin()


def step(
    checkpoint: Checkpoint,
    surroundings: Callable[[], AbstractContextManager[object]],
    eval_before_backward: bool = False,
) -> dict[str, Tensor | None]:
    """Run the forward inside `surroundings` and the backward outside."""
    torch.manual_seed(0)
    region = Region()
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    with surroundings():
        y = checkpoint(region, x)
    if eval_before_backward:
        region.eval()
    y.square().sum().backward()
    return gradients(region)


SILENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "dispatch mode": CosForSinBelowAutograd,
    "function mode": CosForSin,
    "context variable": scale_of_three,
}
LOUD: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "attention kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "default dtype": double_by_default,
}
several_kernels = pytest.mark.cpu_only("emu has one attention, and so nothing differs")


@pytest.mark.parametrize("name", [*SILENT, *LOUD])
def test_row24_recompute_sees_the_surroundings_of_the_forward(name: str) -> None:
    surroundings = {**SILENT, **LOUD}[name]

    assert are_equal(step(ours, surroundings), step(plain, surroundings))


def test_row24_surroundings_do_not_stay_after_the_backward() -> None:
    step(ours, double_by_default)

    assert torch.get_default_dtype() is torch.float32
    assert SCALE.get() == 1.0
    assert torch.equal(torch.sin(torch.zeros(1)), torch.zeros(1))


def test_row24_eval_before_the_backward_does_not_matter() -> None:
    nothing = contextlib.nullcontext
    expected = step(plain, nothing, eval_before_backward=True)

    assert are_equal(step(ours, nothing, eval_before_backward=True), expected)


def test_row24_modules_are_left_in_eval_mode() -> None:
    region = Region()
    y = ours(region, torch.randn(1, 2, 4, 8, requires_grad=True))
    region.eval()
    y.sum().backward()

    assert not any(module.training for module in region.modules())


@torch_fails
@pytest.mark.parametrize("name", SILENT)
def test_row24_torch_computes_other_gradients_silently(name: str) -> None:
    found, expected = step(torch_rerun, SILENT[name]), step(plain, SILENT[name])

    assert not are_equal(found, expected)


@torch_fails
@pytest.mark.parametrize(
    "name", [pytest.param("attention kernel", marks=several_kernels), "default dtype"]
)
def test_row24_torch_fails_on_other_surroundings(name: str) -> None:
    with pytest.raises(CheckpointError, match="different"):
        step(torch_rerun, LOUD[name])


@torch_fails
def test_row24_torch_fails_on_eval_before_the_backward() -> None:
    with pytest.raises(CheckpointError, match="different"):
        step(torch_rerun, contextlib.nullcontext, eval_before_backward=True)
