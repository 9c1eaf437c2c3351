"""Behaviours 69-76: errors reach the user unchanged, and leave nothing behind."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget import compat
from tests.behaviours.steps import Counted, plain
from tests.devices import device_type, rng_state


class BrokenError(Exception):
    """What the functions below raise."""


class Failing:
    """A function that raises in the calls that it is told to."""

    def __init__(self, *calls: int) -> None:
        self.failing = calls
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = torch.nn.functional.dropout(x.exp(), 0.5).sin()
        if self.calls in self.failing:
            self.break_here()
        return y.exp()

    def break_here(self) -> None:
        raise BrokenError("the valve is stuck")


def leaf(n: int = 5) -> Tensor:
    return torch.linspace(-1.0, 1.0, n).requires_grad_()


def ambient() -> dict[str, Any]:
    """Return what a region switches while it runs."""
    with torch.enable_grad():
        y = leaf().exp()
    node: Any = y.grad_fn
    return {
        "random": rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(device_type()),
        "autocast dtype": torch.get_autocast_dtype(device_type()),
        "no saved-tensor hooks": node._saved_result.data_ptr() == y.data_ptr(),
        "recomputing": mb.is_recomputing(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def assert_regions_still_work() -> None:
    x = leaf()
    mb.checkpoint(lambda x: x.exp().sin(), x).sum().backward()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@contextmanager
def autocast_and_back() -> Iterator[None]:
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        yield


def test_b69_an_exception_of_the_forward_comes_with_its_traceback() -> None:
    with pytest.raises(BrokenError, match="the valve is stuck") as caught:
        mb.checkpoint(Failing(1), leaf())
    assert traceback.extract_tb(caught.tb)[-1].name == "break_here"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("around", [nullcontext, autocast_and_back])
def test_b69_an_exception_of_the_forward_leaves_nothing_behind(
    around: Callable[[], Any],
) -> None:
    with around():
        torch.manual_seed(3)
        with pytest.raises(BrokenError, match="stuck"):
            plain(Failing(1), leaf())
        expected = ambient()
        torch.manual_seed(3)
        with pytest.raises(BrokenError, match="stuck"):
            mb.checkpoint(Failing(1), leaf())
        assert ambient() == expected
    assert_regions_still_work()


# torch 2.13 runs the function in a generator, which turns StopIteration to another.
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, StopIteration])
def test_b69_every_kind_of_exception_passes(kind: type[BaseException]) -> None:
    def stop(x: Tensor) -> Tensor:
        raise kind("now")

    with pytest.raises(kind, match="now"):
        mb.checkpoint(stop, leaf())
    assert_regions_still_work()


def test_b70_an_exception_of_the_recompute_comes_with_its_traceback() -> None:
    y = mb.checkpoint(Failing(2), leaf())
    with pytest.raises(BrokenError, match="the valve is stuck") as caught:
        y.sum().backward()
    assert traceback.extract_tb(caught.tb)[-1].name == "break_here"


@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, autocast_and_back])
def test_b70_an_exception_of_the_recompute_leaves_nothing_behind(
    around: Callable[[], Any],
) -> None:
    with autocast_and_back():
        y = mb.checkpoint(Failing(2), leaf()).sum()
    torch.rand(3)
    with around():
        before = ambient()
        with pytest.raises(BrokenError, match="stuck"):
            y.backward()
        assert ambient() == before
    assert_regions_still_work()


def test_b70_a_recompute_that_failed_may_be_tried_again() -> None:
    x = leaf()
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(Failing()(x).sum(), x)
    torch.manual_seed(5)
    loss = mb.checkpoint(Failing(2), x).sum()
    with pytest.raises(BrokenError, match="stuck"):
        loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_b71_an_exception_of_a_nested_region_passes_through_the_outer_one(
    failing_call: int,
) -> None:
    inner = Failing(failing_call)

    def outer(x: Tensor) -> Tensor:
        return mb.checkpoint(inner, x.sin()).exp()

    torch.manual_seed(3)
    before = ambient()
    with pytest.raises(BrokenError, match="stuck") as caught:
        mb.checkpoint(outer, leaf()).sum().backward()
    assert traceback.extract_tb(caught.tb)[-1].name == "break_here"
    assert inner.calls == failing_call
    after = ambient()
    before.pop("random"), after.pop("random")
    assert after == before
    assert_regions_still_work()


def test_b71_a_region_that_survives_the_failure_of_an_inner_one_is_right() -> None:
    def fallback(x: Tensor) -> Tensor:
        try:
            return mb.checkpoint(Failing(1), x)
        except BrokenError:
            return mb.checkpoint(torch.sin, x.cos())

    x, reference = leaf(), leaf()
    mb.checkpoint(fallback, x).sum().backward()
    reference.cos().sin().sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    assert torch.equal(x.grad, reference.grad)


def test_b72_a_keyword_that_nobody_knows_is_an_error() -> None:
    function = Counted(torch.sin)
    with pytest.raises(TypeError, match="earlystop"):
        mb.checkpoint(function, leaf(), earlystop=True)
    assert_regions_still_work()


def test_b72_an_unknown_keyword_of_the_reentrant_variant_is_an_error() -> None:
    with pytest.raises((TypeError, ValueError), match="earlystop"):
        compat.checkpoint(torch.sin, leaf(), use_reentrant=True, earlystop=True)


# torch 2.13 has no curried form.
def test_b72_an_unknown_option_of_the_curried_form_is_refused() -> None:
    with pytest.raises((mb.OptionError, TypeError), match="earlystop"):
        mb.checkpoint(earlystop=True)(torch.sin)(leaf())


@pytest.mark.parametrize("value", ["strict", "", None, True])
def test_b73_a_bad_determinism_check_is_refused_at_once(value: Any) -> None:
    function = Counted(torch.sin)
    with pytest.raises(mb.OptionError, match="determinism_check"):
        mb.checkpoint(function, leaf(), determinism_check=value)
    assert function.calls == 0


class Logged:
    """A `context_fn` that notes when its contexts are entered and left."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self) -> tuple[Any, Any]:
        self.events.append("asked")
        return self.context("forward"), self.context("recompute")

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        self.events.append(f"enter {name}")
        try:
            yield
        finally:
            self.events.append(f"leave {name}")


@pytest.mark.parametrize("early_stop", [True, False])
def test_b74_contexts_are_entered_once_in_forward_and_once_in_recompute(
    early_stop: bool,
) -> None:
    log = Logged()

    def function(x: Tensor) -> Tensor:
        log.events.append("run")
        return x.exp().sin().exp()

    y = mb.checkpoint(function, leaf(), context_fn=log, early_stop=early_stop)
    forward = ["asked", "enter forward", "run", "leave forward"]
    assert log.events == forward
    y.sum().backward()
    assert log.events == [*forward, "enter recompute", "run", "leave recompute"]


def test_b74_contexts_are_left_when_the_function_raises() -> None:
    log = Logged()
    with pytest.raises(BrokenError, match="stuck"):
        mb.checkpoint(Failing(1), leaf(), context_fn=log)
    assert log.events == ["asked", "enter forward", "leave forward"]
    log = Logged()
    with pytest.raises(BrokenError, match="stuck"):
        mb.checkpoint(Failing(2), leaf(), context_fn=log).sum().backward()
    assert log.events[-2:] == ["enter recompute", "leave recompute"]


@contextmanager
def swallowing() -> Iterator[None]:
    try:
        yield
    except BrokenError:
        return


def test_b75_a_context_may_not_swallow_the_exception_of_the_forward() -> None:
    with pytest.raises(RuntimeError, match="context_fn"):
        mb.checkpoint(
            Failing(1), leaf(), context_fn=lambda: (swallowing(), nullcontext())
        )
    assert_regions_still_work()


def test_b75_a_context_that_swallows_in_the_recompute_gives_no_wrong_gradient() -> None:
    x = leaf()
    y = mb.checkpoint(Failing(2), x, context_fn=lambda: (nullcontext(), swallowing()))
    # The exception itself, or a complaint about the context: both are loud.
    with pytest.raises((BrokenError, mb.CheckpointError), match=r"stuck|tensor"):
        y.sum().backward()
    assert x.grad is None


def test_b76_leaving_out_use_reentrant_warns() -> None:
    x = leaf()
    with pytest.warns(UserWarning, match="use_reentrant"):
        y = compat.checkpoint(torch.exp, x)
    with pytest.warns(UserWarning, match="use_reentrant"):
        y = compat.checkpoint_sequential([torch.exp, torch.sin], 2, y)
    y.sum().backward()
    (expected,) = torch.autograd.grad(x.exp().exp().sin().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.filterwarnings("error")
def test_b76_saying_which_variant_does_not_warn() -> None:
    for use_reentrant in (True, False):
        y = compat.checkpoint(torch.exp, leaf(), use_reentrant=use_reentrant)
        y = compat.checkpoint_sequential([torch.exp], 1, y, use_reentrant=use_reentrant)
    mb.checkpoint(torch.exp, leaf())
