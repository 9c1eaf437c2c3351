"""Row B4: a plain step that runs out of memory is profiled on fake tensors."""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget._torch import DispatchMode, is_fake
from membudget.step import Step, state_kept
from tests.garbage import no_collector
from tests.limited_step import make, train
from tests.model_state import state_of
from tests.rows.test_row_b11_failing_allocations import thread_state
from tests.situations import Notes
from tests.test_fit_limited import run

MADE = Notes()
"""What steps made that ran out of memory; not on a module, which is restored."""


class Short(nn.Module):
    """Runs out of memory where tensors have memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        if not is_fake(x):
            MADE(weakref.ref(y))
            raise torch.OutOfMemoryError("on purpose")
        return y


class FailsAtOne(DispatchMode):
    """Fails once, at one of the operators that allocate."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        is_new = any(made.alias_info is None for made in func._schema.returns)
        if isinstance(output, Tensor) and is_new:
            self.count += 1
            if self.count == self.at:
                raise torch.OutOfMemoryError("no memory is left")
        return output


def layers(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
    ]
    model = nn.Sequential(*blocks, nn.BatchNorm1d(16), *last)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def test_row_b04_a_step_that_runs_out_of_memory_is_profiled_fake_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    fitting: Any = import_module("membudget.fit")
    profile_step = fitting.profile_step

    def short(step: Any, optimizer: Any, fake: bool, *others: Any) -> mb.Profile:
        if not fake:
            raise torch.OutOfMemoryError("on purpose")
        found: mb.Profile = profile_step(step, optimizer, fake, *others)
        return found

    monkeypatch.setattr(fitting, "profile_step", short)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with mb.fit(model, torch.randn(64, 16), "100%") as fitted:
        assert fitted.profile.tensors == "fake"
        assert "the plain step ran out of memory" in fitted.report()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("on purpose"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    ],
)
def test_row_b04_a_step_that_can_be_recorded_but_not_measured_is_planned_for(
    monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def short(step: Step) -> None:
        raise error

    monkeypatch.setattr(import_module("membudget.recorded"), "plain_run", short)
    with mb.fit(layers(), torch.randn(64, 16), "70%") as fitted:
        assert fitted.profile.tensors == "real"
        assert fitted.plan.regions
        assert "ran out of memory when it was measured" in fitted.report()


def test_row_b04_a_plan_that_fits_is_taken_although_it_cannot_be_timed(
    monkeypatch: pytest.MonkeyPatch,
):
    def short(step: Step, plans: Any, enough_s: float) -> None:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(import_module("membudget.fastest"), "race", short)
    with mb.fit(layers(), torch.randn(64, 16), "70%") as fitted:
        assert fitted.plan.regions
        assert fitted.slowdown is None
        assert fitted.audit().equal


def test_row_b04_planning_without_memory_says_what_the_budget_would_allow(
    monkeypatch: pytest.MonkeyPatch,
):
    def short(*arguments: Any) -> None:
        raise MemoryError("no tables")

    monkeypatch.setattr(import_module("membudget.planner.nested"), "Chain", short)
    model, x = layers(), torch.randn(64, 16)
    with pytest.raises(mb.OutOfMemoryError, match="while planning a step") as caught:
        mb.fit(model, x, "70%")
    assert caught.value.asked_bytes < caught.value.predicted_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")
def test_row_b04_a_step_is_fitted_and_trains_under_a_limit_that_stops_the_plain_step(
    tmp_path: Path,
):
    # The plain step takes 209 MiB, the plan 100, and what is there before 12.
    done = run("160", str(tmp_path / "losses.pt"), "auto", "100", "no")

    assert done.returncode == 0, done.stderr
    assert "malloc returns blocks of 128 KiB" in done.stdout
    torch.set_num_threads(1)  # As the program does.
    assert torch.equal(torch.load(tmp_path / "losses.pt"), train(*make()))


def test_row_b04_no_tensor_of_the_failed_step_lives_when_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
):
    fitting: Any = import_module("membudget.fit")
    model, profile_step, alive = layers(Short()), fitting.profile_step, []
    MADE.items.clear()

    def noting(step: Any, *options: Any) -> mb.Profile:
        alive.append([made() is not None for made in MADE.items])
        found: mb.Profile = profile_step(step, *options)
        return found

    monkeypatch.setattr(fitting, "profile_step", noting)
    with no_collector(), pytest.raises(mb.OutOfMemoryError, match="whose plan takes"):
        mb.fit(model, torch.randn(64, 16), "100%")

    assert alive == [[], [False]]


def test_row_b04_the_failed_step_is_freed_before_the_state_is_restored():
    model = layers(Short())
    step = Step(model, torch.randn(64, 16), None)
    MADE.items.clear()

    with (
        no_collector(),
        pytest.raises(torch.OutOfMemoryError, match="on purpose") as caught,
        state_kept(step, has_values=True),
    ):
        step.run()

    assert caught.value.__traceback__ is not None
    assert [made() for made in MADE.items] == [None]


def test_row_b04_restoring_a_step_takes_one_copy_of_model_and_batch():
    step = Step(nn.Linear(64, 64), torch.randn(4096, 64), None)

    def keep_and_restore() -> None:
        with state_kept(step, has_values=True):
            step.prepare()

    found = mb.peak(keep_and_restore).peak_bytes
    assert found < 1.05 * mb.storage_bytes(step.tensors())


def test_row_b04_a_verifying_step_without_memory_says_what_the_budget_would_allow():
    model, x = layers(Short()), torch.randn(64, 16)
    before, thread = state_of(model), thread_state()

    with pytest.raises(mb.OutOfMemoryError, match="device has less memory") as caught:
        mb.fit(model, x, "70%")

    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert 0 < caught.value.predicted_bytes <= caught.value.asked_bytes
    assert f"{caught.value.asked_bytes:,} bytes" in str(caught.value)
    assert state_of(model) == before
    assert thread_state() == thread


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("tries", [5, pytest.param(16, marks=pytest.mark.slow)])
def test_row_b04_an_allocation_that_fails_in_fit_leaves_everything_as_it_was(
    fake: bool, tries: int
):
    model, x = layers(), torch.randn(64, 16)
    before, thread = state_of(model), thread_state()
    with FailsAtOne(0) as operators:
        mb.fit(model, x, "70%", fake=fake).remove()
    assert state_of(model) == before

    # A fake profile without memory has no numbers yet.
    expected = torch.OutOfMemoryError if fake else mb.OutOfMemoryError
    for at in range(1, operators.count, operators.count // tries):
        with suppress(expected), FailsAtOne(at):
            mb.fit(model, x, "70%", fake=fake).remove()
        assert state_of(model) == before, at
        assert thread_state() == thread, at
