"""How long a recomputed tensor stays with its handle."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine import groups
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


@pytest.fixture(autouse=True)
def no_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget backwards of other tests that failed."""
    monkeypatch.setattr(groups, "BY_BACKWARD", {})


@pytest.fixture
def statistics() -> Statistics:
    return Statistics("block")


def run(engine: str, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Return the input and the output of a region."""
    x = torch.linspace(0, 1, 3, requires_grad=True)
    options = RegionOptions(engine=engine, verify=False)  # type: ignore[arg-type]
    function = torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Tanh())
    return x, run_region(function, (x,), {}, options, statistics)


def backward(x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(y.sum(), x, retain_graph=True)


@ENGINES
def test_each_backward_recomputes_once(engine, statistics):
    x, y = run(engine, statistics)
    for count in (1, 2, 3):
        backward(x, y)
        assert statistics.recomputes == count


@ENGINES
def test_in_a_group_all_backwards_share_one_recompute(engine, statistics):
    x, y = run(engine, statistics)
    with mb.execution_group():
        backward(x, y)
        backward(x, y)
    assert statistics.recomputes == 1
    backward(x, y)
    assert statistics.recomputes == 2


@ENGINES
def test_what_an_inner_group_recomputed_stays_until_the_outer_one_ends(
    engine, statistics
):
    x, y = run(engine, statistics)
    with mb.execution_group():
        with mb.execution_group():
            backward(x, y)
        backward(x, y)
        assert statistics.recomputes == 1
    backward(x, y)
    assert statistics.recomputes == 2


@ENGINES
def test_an_inner_group_that_recomputed_nothing_ends_alone(engine, statistics):
    x, y = run(engine, statistics)
    with mb.execution_group():
        with mb.execution_group():
            pass
        assert len(groups.OPEN_GROUPS) == 1
        backward(x, y)
        backward(x, y)
        assert statistics.recomputes == 1
    assert groups.OPEN_GROUPS == []
    backward(x, y)
    assert statistics.recomputes == 2


@ENGINES
def test_a_group_that_fails_lets_go_as_any_other(engine, statistics):
    x, y = run(engine, statistics)
    with contextlib.suppress(KeyError), mb.execution_group():
        backward(x, y)
        raise KeyError
    assert groups.OPEN_GROUPS == []
    backward(x, y)
    assert statistics.recomputes == 2


@ENGINES
def test_what_a_backward_recomputed_and_did_not_use_is_recomputed_by_the_next(engine):
    x = torch.linspace(0, 1, 3, requires_grad=True)
    statistics = Statistics("block")
    options = RegionOptions(engine=engine, verify=False)
    first, second = run_region(
        lambda x: (x.sin().exp(), x.cos().exp()), (x,), {}, options, statistics
    )
    backward(x, second)
    backward(x, first)
    assert statistics.recomputes == 2
    assert groups.BY_BACKWARD == {}


class Frame:
    """A frame that counts how often it was released."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1

    def recompute(self) -> None:
        """Drop nothing, so recompute nothing."""


def test_outside_of_a_backward_the_caller_must_release():
    frame = Frame()
    assert not groups.release_in_time(frame)
    assert frame.released == 0


def test_a_group_releases_its_frames_at_its_end_and_not_before():
    frame = Frame()
    with mb.execution_group():
        assert groups.release_in_time(frame)
        assert frame.released == 0
    assert frame.released == 1


def test_a_frame_that_is_gone_is_not_released():
    with mb.execution_group():
        groups.release_in_time(Frame())


def in_backward(act):
    """Call a function in the middle of a backward."""

    class Acts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            act()
            return gradient

    Acts.apply(torch.ones(1, requires_grad=True)).sum().backward()


def test_a_backward_releases_its_frames_at_its_end_and_not_before():
    first, second = Frame(), Frame()
    seen = []

    def act() -> None:
        assert groups.release_in_time(first)
        assert groups.release_in_time(second)
        seen.append((first.released, second.released))

    in_backward(act)
    assert seen == [(0, 0)]
    assert (first.released, second.released) == (1, 1)


def test_backwards_that_failed_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(groups, "_MOST_BACKWARDS", 3)
    frame = Frame()

    def fail() -> None:
        groups.release_in_time(frame)
        raise ValueError("in the backward")

    for _ in range(5):
        with pytest.raises(ValueError, match="in the backward"):
            in_backward(fail)
    left = sorted(groups.BY_BACKWARD)
    assert len(left) == 3
    in_backward(lambda: groups.release_in_time(frame))
    # The oldest had to go; the one that ended did by itself.
    assert sorted(groups.BY_BACKWARD) == left[1:]


def test_a_backward_that_is_forgotten_among_too_many_ends_in_peace(monkeypatch):
    monkeypatch.setattr(groups, "_MOST_BACKWARDS", 0)
    x = torch.randn(3, requires_grad=True)

    mb.checkpoint(lambda x: x.sin().exp().tanh(), x, engine="rerun").sum().backward()

    assert x.grad is not None
