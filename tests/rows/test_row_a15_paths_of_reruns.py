"""Row A15 for reruns: what is verified is known by the path that a call took."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.errors import RecomputeMismatchError


class Holder:
    """An object of the user's, with a count."""

    count = 0.0


def rerun_on_path() -> Callable[[bool], Tensor]:
    """Return a step whose long path alone hangs on state that it advances."""
    holder = Holder()
    is_long = threading.Event()

    def function(x: Tensor) -> Tensor:
        x = x.sin()
        if is_long.is_set():
            holder.count += 1.0
            x = (x * holder.count).sin().tanh()
        return x.exp()

    def step(long: bool) -> Tensor:
        (is_long.set if long else is_long.clear)()
        x = torch.linspace(0.1, 1, 5, requires_grad=True)
        mb.checkpoint(function, x, engine="rerun").sum().backward()
        assert x.grad is not None
        return x.grad

    return step


def test_row_a15_a_path_that_was_not_verified_is_verified_when_it_is_taken_again():
    step = rerun_on_path()
    for _ in range(4):
        step(False)
    step(True)  # The fifth call: nobody knew that it would take another path.
    step(False)

    with pytest.raises(RecomputeMismatchError, match="other values"):
        step(True)
