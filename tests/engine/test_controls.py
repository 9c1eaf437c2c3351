"""How long a recomputed tensor stays with its handle."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine import controls
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region
from tests.oracles import CountedOperators

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


@pytest.fixture(autouse=True)
def no_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget backwards of other tests that failed."""
    monkeypatch.setattr(controls, "BY_BACKWARD", {})


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
def test_a_group_that_fails_lets_go_as_any_other(engine, statistics):
    x, y = run(engine, statistics)
    with contextlib.suppress(KeyError), mb.execution_group():
        backward(x, y)
        raise KeyError
    assert controls.OPEN_GROUPS == []
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
    assert controls.BY_BACKWARD == {}


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
    assert not controls.release_in_time(frame)
    assert frame.released == 0


def test_a_group_releases_its_frames_at_its_end_and_not_before():
    frame = Frame()
    with mb.execution_group():
        assert controls.release_in_time(frame)
        assert frame.released == 0
    assert frame.released == 1


def test_a_frame_that_is_gone_is_not_released():
    with mb.execution_group():
        controls.release_in_time(Frame())


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
        assert controls.release_in_time(first)
        assert controls.release_in_time(second)
        seen.append((first.released, second.released))

    in_backward(act)
    assert seen == [(0, 0)]
    assert (first.released, second.released) == (1, 1)


def test_backwards_that_failed_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(controls, "_MOST_BACKWARDS", 3)
    frame = Frame()

    def fail() -> None:
        controls.release_in_time(frame)
        raise ValueError("in the backward")

    for _ in range(5):
        with pytest.raises(ValueError, match="in the backward"):
            in_backward(fail)
    left = sorted(controls.BY_BACKWARD)
    assert len(left) == 3
    in_backward(lambda: controls.release_in_time(frame))
    # The oldest had to go; the one that ended did by itself.
    assert sorted(controls.BY_BACKWARD) == left[1:]


def test_a_backward_that_is_forgotten_among_too_many_ends_in_peace(monkeypatch):
    monkeypatch.setattr(controls, "_MOST_BACKWARDS", 0)
    x = torch.randn(3, requires_grad=True)

    mb.checkpoint(lambda x: x.sin().exp().tanh(), x, engine="rerun").sum().backward()

    assert x.grad is not None


def block(x: Tensor) -> Tensor:
    return torch.dropout(x.sin().exp(), 0.5, True).cos()


def run_collected(engine: str) -> tuple[Tensor, Tensor, mb.Regions]:
    torch.manual_seed(0)
    x = torch.randn(5, requires_grad=True)
    with mb.collect_regions() as regions:
        y = mb.checkpoint(block, x, engine=engine, verify=False)
    return x, y, regions


@ENGINES
def test_the_next_backward_takes_what_was_recomputed(engine: str) -> None:
    x, y, regions = run_collected(engine)
    expected, z, _ = run_collected(engine)
    z.sum().backward()

    regions.recompute()
    with CountedOperators() as counter:
        y.sum().backward()

    assert "exp" not in counter.counts
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


@ENGINES
def test_recomputing_is_done_once(engine: str) -> None:
    _, _, regions = run_collected(engine)
    regions.recompute()
    with CountedOperators() as counter:
        regions.recompute()

    assert "exp" not in counter.counts


@ENGINES
def test_a_second_backward_recomputes_again(engine: str) -> None:
    x, y, regions = run_collected(engine)
    regions.recompute()
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)

    assert torch.equal(first, second)


@ENGINES
def test_collected_regions_die_with_their_graph(engine: str) -> None:
    _, y, regions = run_collected(engine)
    assert len(regions) == 1
    del y
    gc.collect()

    assert len(regions) == 0
    regions.recompute()


def test_only_what_runs_inside_is_collected() -> None:
    x = torch.randn(5, requires_grad=True)
    before = mb.checkpoint(block, x)
    with mb.collect_regions() as regions:
        inside = mb.checkpoint(block, x)
    after = mb.checkpoint(block, x)

    assert len(regions) == 1
    del before, inside, after


@ENGINES
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_dropped_tensor_is_recomputed_ahead(engine: str, count: int) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.exp()
        return x

    x = torch.linspace(0, 1, 3, requires_grad=True)
    with mb.collect_regions() as regions:
        y = mb.checkpoint(function, x, engine=engine, verify=False)
    with CountedOperators() as ahead:
        regions.recompute()
    with CountedOperators() as behind:
        (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)

    assert ahead.counts["exp"] == count
    assert "exp" not in behind.counts
    assert torch.equal(found, expected)
