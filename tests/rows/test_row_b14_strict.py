"""Row B14: replay says where plain autograd would raise, and raises if it is asked."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb


def overwrites(x: Tensor) -> Tensor:
    y = x.sin()
    z = y.exp()
    with torch.no_grad():
        z.mul_(2)  # The exponential has saved it.
    return z * 1


def inside(x: Tensor, **options: Any) -> None:
    mb.checkpoint(engine="replay", **options)(overwrites)(x).sum().backward()


def after(x: Tensor, **options: Any) -> None:
    y = mb.checkpoint(engine="replay", **options)(lambda x: x.sin().exp())(x)
    y.detach().mul_(2)
    y.sum().backward()


@pytest.mark.parametrize("write", [inside, after])
def test_row_b14_a_saved_tensor_that_was_written_warns_the_first_time(write: Any):
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(mb.OverwrittenWarning, match="modified by an inplace operation"):
        write(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(x)


@pytest.mark.parametrize("write", [inside, after])
@pytest.mark.parametrize("verify", [True, False])
def test_row_b14_strict_raises_as_plain_does(write: Any, verify: bool):
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwrites(x).sum().backward()
    for _ in range(2):
        with pytest.raises(
            mb.ChangedSinceForwardError, match="modified by an inplace operation"
        ):
            write(x, strict=True, verify=verify)


def test_row_b14_strict_says_nothing_where_plain_trains():
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        return y.sin()

    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mb.checkpoint(engine="replay", strict=True)(function)(x).sum().backward()
    assert x.grad is not None
