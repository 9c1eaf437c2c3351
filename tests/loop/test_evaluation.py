"""Calls without gradients are foreseen: what needs more than is left does not begin."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.loop.call_recorder import CallRecorder
from tests.loop.training import counted, tokens
from tests.loops.models import Cache, Images, Language, Recurrent, generate, loss_of

SHORT, LONG = 16, 256


def made() -> nn.Module:
    torch.manual_seed(0)
    return Language().eval()


def live_bytes() -> int:
    with counted() as seen:
        pass
    return seen.most_bytes


def needed(call: Callable[[], object]) -> int:
    """Return the peak of a call above what is live before it."""
    before = live_bytes()
    with counted() as seen:
        call()
    return seen.most_bytes - before


def refusal(model: nn.Module, call: Callable[[], object]) -> mb.BudgetError:
    limit = live_bytes() + 1
    with (
        pytest.raises(mb.BudgetError, match="without gradients") as caught,
        mb.budget(model, limit),
    ):
        call()
    return caught.value


def filled(model: nn.Module, length: int) -> Cache:
    cache: Cache = {}
    with torch.no_grad():
        model(tokens(length), cache=cache)
    return cache


@pytest.mark.cpu_only("kernels of the CPU are tried for their workspaces")
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Language, lambda: tokens(LONG)),
        (Images, lambda: torch.randn(4, 3, 24, 24)),
        (Recurrent, lambda: tokens(SHORT)),
    ],
)
def test_the_least_that_a_refusal_names_is_what_the_call_takes(make, inputs, around):
    model, given = make().eval(), inputs()

    def call() -> None:
        with around():
            model(given)

    call()
    before = live_bytes()
    error = refusal(model, call)
    took = needed(call)
    assert error.least_bytes == before + took + took // 100
    assert sum(holder.bytes for holder in error.holders) == before + took


@pytest.mark.cpu_only("kernels of the CPU are tried for their workspaces")
def test_a_cache_that_is_replaced_is_not_counted_twice():
    model = made()
    token = tokens(1)

    def call() -> None:
        with torch.no_grad():
            model(token, cache=cache)

    with counted():  # What was made before is not seen to be freed.
        cache = filled(model, LONG)
        error = refusal(model, call)
        before = live_bytes()
        took = needed(call)
    assert took < sum(t.nbytes for pair in cache.values() for t in pair)
    assert 0 <= error.least_bytes - (before + took) < 0.02 * took + 5000
    assert sum(holder.bytes for holder in error.holders) <= error.least_bytes


@pytest.mark.cpu_only("kernels of the CPU are tried for their workspaces")
def test_casts_that_autocast_caches_are_counted():
    model = made().train()  # What is frozen is not cached.

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(tokens(SHORT))

    call()
    before = live_bytes()
    error = refusal(model, call)
    took = needed(call)
    assert took <= error.least_bytes - before <= 1.05 * took


def test_a_call_that_needs_more_than_is_left_does_not_begin():
    model, ran = made(), []
    model.head.register_forward_pre_hook(lambda _, args: ran.append(args[0]))
    with (
        pytest.raises(mb.BudgetError, match="Smallest feasible budget") as caught,
        mb.budget(model, live_bytes() + 50_000),
        torch.no_grad(),
    ):
        model(tokens(LONG))
    assert not any(type(tensor) is Tensor for tensor in ran)
    with (
        counted() as seen,
        mb.budget(model, caught.value.least_bytes),
        torch.no_grad(),
    ):
        model(tokens(LONG))
    assert seen.most_bytes <= caught.value.least_bytes


@pytest.mark.parametrize("choice", ["warn", "plain"])
def test_a_call_over_budget_may_run_with_a_warning(choice):
    model = made()
    with torch.no_grad():
        plain = model(tokens(LONG))
        with (
            mb.budget(model, live_bytes() + 50_000, on_exceed=choice),
            pytest.warns(mb.BudgetWarning, match="a call of Language on 8x256 without"),
        ):
            found = model(tokens(LONG))
    assert torch.equal(found, plain)


def test_a_call_is_recorded_only_if_those_before_do_not_show_that_it_fits(monkeypatch):
    recordings = []
    recorded = CallRecorder.recorded

    def noting(self: CallRecorder, *args: Any) -> Any:
        recordings.append(args)
        return recorded(self, *args)

    monkeypatch.setattr(CallRecorder, "recorded", noting)
    model = made()
    with mb.budget(model, "1GiB"), torch.no_grad():
        for length in (SHORT, SHORT, SHORT + 1, 2 * SHORT, 3):
            model(tokens(length))
        assert len(recordings) == 1
        generate(model, tokens(SHORT), 20, has_cache=True)
        assert len(recordings) == 3  # With an empty cache, and with a filled one.


def test_a_number_that_counts_tokens_is_a_size(monkeypatch):
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, start: int) -> Tensor:
            return self.linear(x) + start

    calls: list[int] = []
    recorded = CallRecorder.recorded
    monkeypatch.setattr(
        CallRecorder,
        "recorded",
        lambda self, *args: calls.append(1) or recorded(self, *args),
    )
    model = Placed()
    with mb.budget(model, "1GiB"), torch.no_grad():
        for start in range(10):
            model(torch.randn(2, 8), start)
    assert len(calls) == 1


def test_between_forward_and_backward_a_call_is_measured_with_the_micro_batch():
    model = made().train()
    ids = tokens(SHORT)
    longer = tokens(2 * SHORT)

    def train(steps: int) -> None:
        for _ in range(steps):
            logits = model(ids)
            with torch.no_grad():
                model(longer)
            loss_of(logits, ids).backward()
            del logits
            model.zero_grad()

    train(1)
    with counted() as seen:
        train(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mb.BudgetWarning)
        with mb.budget(model, int(0.97 * seen.most_bytes)) as fitted:
            train(1)
            with counted() as later:
                train(2)
    assert later.most_bytes <= 0.97 * seen.most_bytes
    assert len(fitted.status().situations) == 1


def test_an_evaluation_is_no_part_of_the_micro_batch_before_it():
    model, ids = made().train(), tokens(SHORT)
    with mb.budget(model, "1GiB") as fitted:
        for _ in range(2):
            loss_of(model(ids), ids).backward()
            model.zero_grad()
            with torch.no_grad():
                model(tokens(LONG))
    (status,) = fitted.status().situations
    assert status.uses == 2
    assert 0 < status.worst_bytes < 1.1 * status.predicted_bytes


class Reading(nn.Module):
    """Reads a value, which a fake tensor does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 if x.sum().item() > 0 else 2)


def test_a_call_that_cannot_be_recorded_runs_and_the_report_says_so():
    model = Reading()
    with mb.budget(model, "1GiB") as fitted, torch.no_grad():
        model(torch.randn(2, 8))
        model(torch.randn(2, 8))
    assert "calls without gradients are not bounded" in fitted.report()


def test_a_share_bounds_no_calls_without_gradients():
    model = made()
    with mb.budget(model, "1%"), torch.no_grad():
        assert model(tokens(LONG)).shape == (8, LONG, 64)


@pytest.mark.parametrize("enter", [torch.no_grad, nullcontext])
def test_a_frozen_model_is_bounded_in_any_mode(
    enter: Callable[[], AbstractContextManager[Any]],
):
    model = made().requires_grad_(False)
    with (
        pytest.raises(mb.BudgetError, match="a call of Language on 8x256 without"),
        mb.budget(model, live_bytes() + 50_000),
        enter(),
    ):
        model(tokens(LONG))
