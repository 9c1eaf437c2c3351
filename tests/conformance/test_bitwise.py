"""Every case of the zoo in every way of making regions equals the plain step.

Equal means each bit of the loss, the outputs, every gradient, every buffer and other
state, and every random stream. Where a region cannot keep that, the case says with
which error it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from tests.devices import elsewhere, is_cpu
from tests.oracles import (
    Backward,
    Way,
    assert_same_step,
    backward_twice,
    differences,
    double_backward,
    plain,
    run_step,
)
from tests.zoo import CASES, Call, Case


def one_region(call: Call, **options: Any) -> Any:
    """Run the call as one region."""
    return mb.checkpoint(call.function, *call.args, **call.kwargs, **options)


def nested(depth: int) -> Way:
    """Return the way that runs the call as a region in a region, `depth` deep."""

    def way(call: Call) -> Any:
        function = call.function
        for _ in range(depth - 1):
            function = functools.partial(mb.checkpoint, function)
        return mb.checkpoint(function, *call.args, **call.kwargs)

    return way


def region_under_work(call: Call) -> Any:
    """Run the call as a region inside a region that computes before and after it."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_stretched, args))
        return _finished(mb.checkpoint(call.function, *args, **kwargs))

    return mb.checkpoint(outer, *call.args, **call.kwargs)


def work_alone(call: Call) -> Any:
    """Run what `region_under_work` runs, without regions."""
    with mb.disable_checkpointing():
        args = tuple(map(_stretched, call.args))
        return _finished(call.function(*args, **call.kwargs))


def _stretched(value: Any) -> Any:
    return value * 1.25 if _is_floating(value) else value


def _finished(value: Any) -> Any:
    return value.sin() if _is_floating(value) else value


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _Stretch(nn.Module):
    """The layer before the call: it passes on what it is given, floats stretched."""

    def forward(self, *args: Any) -> Any:
        args = tuple(map(_stretched, args))
        return args if len(args) != 1 else args[0]


class _Middle(nn.Module):
    """The call as a layer of a chain."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.function = functools.partial(call.function, **call.kwargs)
        self.takes_one = len(call.args) == 1

    def forward(self, *args: Any) -> Any:
        if not self.takes_one and len(args) == 1:
            (args,) = args
        return self.function(*args)


class _Finish(nn.Module):
    """The layer after the call."""

    def forward(self, value: Any) -> Any:
        return _finished(value)


def in_a_chain(call: Call) -> Any:
    """Run the call as the middle segment of three under `checkpoint_sequential`."""
    chain: list[Callable[..., Any]] = [_Stretch(), _Middle(call), _finish]
    return mb.checkpoint_sequential(chain, 3, *call.args)


def _finish(*outputs: Any) -> Any:
    # With several inputs, the chain hands on a tuple as several arguments.
    return _finished(outputs[0] if len(outputs) == 1 else outputs)


def applied(call: Call) -> Any:
    """Run the call as a module of a `Sequential` on which `apply` put regions."""
    chain = nn.Sequential(_Middle(call), _Finish())
    regions = mb.apply(chain, blocks=_Middle)
    args = tuple(map(_stretched, call.args))
    try:
        return chain(args[0] if len(args) == 1 else args)
    finally:
        regions.remove()


def called_twice(call: Call) -> Any:
    """Run the call twice, each time as a region."""
    return [one_region(call), one_region(call)]


def twice_plain(call: Call) -> Any:
    """Run the call twice."""
    return [plain(call), plain(call)]


WAYS: dict[str, tuple[Way, Way]] = {
    "rerun": (plain, one_region),
    "nested": (plain, nested(2)),
    "three-deep": (plain, nested(3)),
    "under-work": (work_alone, region_under_work),
    "sequential": (work_alone, in_a_chain),
    "apply": (work_alone, applied),
    "no-early-stop": (plain, functools.partial(one_region, early_stop=False)),
    "values": (plain, functools.partial(one_region, determinism_check="values")),
    "twice": (twice_plain, called_twice),
}

BACKWARDS: dict[str, Backward] = {
    "retain-graph": backward_twice,
    "double-backward": double_backward,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_under_regions_is_the_plain_step(case: Case, way: str) -> None:
    if way == "twice" and case.not_twice:
        pytest.skip(case.not_twice)
    reference, regions = WAYS[way]
    check(case, reference, regions)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_several_backwards_are_those_of_the_plain_step(
    case: Case, depth: int, backward: str
) -> None:
    if backward == "double-backward" and case.not_double:
        pytest.skip(case.not_double)
    check(case, plain, nested(depth), BACKWARDS[backward])


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.not_reentrant], ids=str
)
def test_a_step_under_a_reentrant_region_is_the_plain_step(case: Case) -> None:
    check(case, plain, functools.partial(one_region, use_reentrant=True))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.not_reentrant], ids=str
)
def test_what_a_reentrant_region_does_not_take_is_never_silently_wrong(
    case: Case,
) -> None:
    try:
        step = run_step(case, functools.partial(one_region, use_reentrant=True))
    except RuntimeError:  # A `ReentrantLimitError`, or one of autograd's own.
        return
    found = differences(run_step(case, plain), step)
    # That an output claims to require a gradient does no harm.
    assert [name for name in found if not name.endswith("requires_grad")] == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.torch_needs_guards], ids=str
)
def test_a_step_without_guards_is_plain_where_torch_is_right(case: Case) -> None:
    if case.name == "reseeding_inside" and not is_cpu():
        pytest.skip("it seeds devices that the region has no argument on")

    def unguarded(call: Call) -> Any:
        # The default device is left to the user, as autograd's thread has another.
        call = replace(call, function=elsewhere(call.function))
        return one_region(call, guards=False)

    check(case, plain, unguarded)


def a_counter_in_a_dict() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = {"n": 0}

    def function(x: torch.Tensor) -> torch.Tensor:
        calls["n"] += 1
        return (x * calls["n"]).sin()

    return function


def a_counter_closed_over() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return (x * calls).sin()

    return function


def a_mean_in_a_list() -> Callable[[torch.Tensor], torch.Tensor]:
    means = [torch.ones(6)]

    def function(x: torch.Tensor) -> torch.Tensor:
        means[0] = 0.9 * means[0] + 0.1 * x.detach().mean(0)
        return ((x - means[0]) * x).sin()

    return function


def an_iterator() -> Callable[[torch.Tensor], torch.Tensor]:
    factors = iter([2.0, 3.0, 5.0])
    return lambda x: (x * next(factors)).sin()


def a_quasi_random_sequence() -> Callable[[torch.Tensor], torch.Tensor]:
    engine = torch.quasirandom.SobolEngine(6, scramble=True, seed=1)
    return lambda x: (x * engine.draw(5).to(x.device)).sin()


@pytest.mark.parametrize(
    "make",
    [
        a_counter_in_a_dict,
        a_counter_closed_over,
        a_mean_in_a_list,
        an_iterator,
        a_quasi_random_sequence,
    ],
)
def test_state_that_only_python_knows_is_detected_by_its_values(
    make: Callable[[], Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    # These are the limits of running a function again: no engine can put back what an
    # iterator has given out. The default check, of shapes, does not see it.
    x = torch.randn(5, 6, requires_grad=True)
    y = mb.checkpoint(make(), x, determinism_check="values")

    with pytest.raises(mb.RecomputeMismatchError, match="with other values in it"):
        y.sum().backward()


def check(
    case: Case, reference: Way, regions: Way, backward: Backward | None = None
) -> None:
    """Hold a step under regions to its reference, or to the error that refuses it."""
    given = () if backward is None else (backward,)
    if case.refused:
        with pytest.raises(mb.CheckpointError, match=case.refused):
            run_step(case, regions, *given)
        return
    assert_same_step(run_step(case, reference, *given), run_step(case, regions, *given))
