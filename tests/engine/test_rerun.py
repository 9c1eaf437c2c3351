"""A rerun: what it does where the function makes it hard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.behaviours.steps import Region, differences, region_with

RERUN = region_with(engine="rerun")


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


class Runs:
    """Notes how far each run of a function came."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def begin(self) -> list[str]:
        """Return the list for the steps of a new run."""
        self.steps.append([])
        return self.steps[-1]


def differentiating(runs: Runs) -> Any:
    """Return a function that differentiates inside, and goes on behind that."""

    def function(x: Tensor) -> Tensor:
        reached = runs.begin()
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        reached.append("slope")
        z = (y * slope).cos()
        reached.append("product")
        return z

    return function


@pytest.mark.parametrize(
    ("early_stop", "last_run"), [(True, ["slope"]), (False, ["slope", "product"])]
)
def test_early_stop_holds_where_the_function_differentiates_inside(
    early_stop, last_run
):
    runs = Runs()
    x = leaf()
    y = mb.checkpoint(differentiating(runs), x, engine="rerun", early_stop=early_stop)
    y.sum().backward()
    assert runs.steps[0] == ["slope", "product"]
    assert runs.steps[-1] == last_run


def test_a_function_that_differentiates_inside_has_the_plain_gradients():
    def step(region: Region) -> Any:
        x = leaf()
        y = region(differentiating(Runs()), x)
        y.sum().backward()
        return x, y

    assert differences(step, RERUN) == []


def test_random_slopes_that_are_saved_before_they_are_drawn_are_recomputed_whole():
    def step(region: Region) -> Any:
        x = leaf()

        def function(x: Tensor) -> Tensor:
            y = x.sin()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return torch.nn.functional.rrelu(slope - 0.8, training=True)

        y = region(function, x)
        y.sum().backward()
        return x, y

    assert differences(step, RERUN) == []


def test_a_mismatch_that_the_function_swallows_is_raised_all_the_same():
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        with contextlib.suppress(Exception):
            return (x.exp() if len(calls) == 1 else torch.cat([x, x]).exp()).sin()
        return x

    loss = mb.checkpoint(function, leaf(), engine="rerun").sum()
    with pytest.raises(mb.RecomputeMismatchError, match="did not repeat its forward"):
        loss.backward()


def test_an_inner_region_does_not_stop_at_what_ends_the_outer_one():
    runs = Runs()

    def inner(x: Tensor) -> Tensor:
        return x.exp().cos()

    def outer(x: Tensor) -> Tensor:
        reached = runs.begin()
        y = mb.checkpoint(inner, x.sin(), engine="rerun")
        reached.append("inner")
        z = y.tanh()
        reached.append("outer")
        return z

    def step(region: Region) -> Any:
        x = leaf()
        y = region(outer, x)
        y.sum().backward()
        return x, y

    assert differences(step, RERUN) == []
    assert runs.steps[0] == runs.steps[1] == ["inner", "outer"]


def swapping(count: int) -> Any:
    """Return a function whose recompute saves fewer or more tensors."""
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        y = x.sin()
        for _ in range(2 if len(calls) == 1 else count):
            y = y.sin()
        return y

    return function


@pytest.mark.parametrize("count", [1, 0])
def test_fewer_tensors_than_in_the_forward_are_told_with_both_numbers(count):
    loss = mb.checkpoint(swapping(count), leaf(), engine="rerun").sum()
    with pytest.raises(mb.RecomputeMismatchError, match="number of tensors") as caught:
        loss.backward()
    assert caught.value.index is None
    assert (caught.value.saved, caught.value.recomputed) == (
        *("3 tensors", f"{count + 1} tensors"),
    )


def test_more_tensors_are_told_where_the_recompute_runs_to_its_end():
    function = swapping(4)
    loss = mb.checkpoint(function, leaf(), engine="rerun", early_stop=False).sum()
    with pytest.raises(mb.RecomputeMismatchError, match="recomputed: 5 ten"):
        loss.backward()


def test_unchecked_fewer_tensors_are_still_no_silent_gradient():
    loss = mb.checkpoint(
        swapping(0), leaf(), engine="rerun", determinism_check="none"
    ).sum()
    with pytest.raises(mb.RecomputeMismatchError, match="fewer tensors, and not the"):
        loss.backward()


def test_other_values_are_told_where_values_are_compared():
    calls: list[int] = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return (x * float(len(calls))).sin().exp().cos()

    region = mb.checkpoint(engine="rerun", determinism_check="values")
    loss = region(function)(leaf()).sum()
    with pytest.raises(mb.RecomputeMismatchError, match="with other values") as caught:
        loss.backward()
    assert caught.value.index == 0
    unchecked = mb.checkpoint(engine="rerun", determinism_check="none")
    unchecked(function)(leaf()).sum().backward()


@pytest.mark.parametrize(
    ("early_stop", "last_run"), [(True, []), (False, ["saved", "end"])]
)
def test_comparing_values_stops_early_too(early_stop, last_run):
    runs = Runs()

    def function(x: Tensor) -> Tensor:
        reached = runs.begin()
        y = x.sin().cos()
        reached.append("saved")
        z = y + 1
        reached.append("end")
        return z

    y = mb.checkpoint(
        function,
        leaf(),
        engine="rerun",
        determinism_check="values",
        early_stop=early_stop,
    )
    y.sum().backward()
    assert runs.steps == [["saved", "end"], last_run]


@pytest.mark.parametrize(
    "exchange",
    [lambda y: y.add_(1), lambda y: setattr(y, "data", y.data.clone())],
    ids=["written", "exchanged"],
)
def test_what_a_function_changes_after_it_saved_it_is_refused(exchange):
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        with torch.no_grad():
            exchange(y)
        return (y * 2).sin()

    loss = mb.checkpoint(function, leaf(), engine="rerun").sum()
    with pytest.raises(mb.ChangedSinceForwardError, match=r"shape \(2, 3\)"):
        loss.backward()


def test_a_context_that_swallows_exceptions_is_refused():
    @contextlib.contextmanager
    def swallows() -> Iterator[None]:
        with contextlib.suppress(KeyError):
            yield

    def fail(x: Tensor) -> Tensor:
        raise KeyError("in the forward")

    def contexts() -> Any:
        return swallows(), contextlib.nullcontext()

    with pytest.raises(mb.CheckpointError, match="swallowed an exception"):
        mb.checkpoint(fail, leaf(), context_fn=contexts)


def test_comparing_values_stops_at_the_last_tensor_that_is_needed():
    reached: list[str] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin().cos()
        reached.append("first")
        second = x.exp().tanh().sqrt()
        reached.append("second")
        return first, second

    x = torch.rand(3, requires_grad=True)
    region = mb.checkpoint(engine="rerun", determinism_check="values")
    first, second = region(function)(x)
    del second
    first.sum().backward()
    assert reached == ["first", "second"]


def test_a_sparse_tensor_that_is_changed_after_it_was_saved_is_refused():
    def function(x: Tensor) -> Tensor:
        matrix = torch.eye(2).to_sparse()
        y = torch.sparse.mm(matrix, x)
        matrix.mul_(2)
        return y.sin()

    loss = mb.checkpoint(function, leaf(), engine="rerun").sum()
    with pytest.raises(mb.ChangedSinceForwardError, match=r"shape \(2, 2\)"):
        loss.backward()


def test_an_inner_backward_refuses_what_was_overwritten_as_plain_does():
    def function(x):
        y = x.exp()
        inner = y.sum()
        y.mul_(2)
        return torch.autograd.grad(inner, x, create_graph=True)[0] * x

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        function(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mb.checkpoint(function, x, engine="rerun")
