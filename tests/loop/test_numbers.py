"""Numbers and strings among the arguments: which decide nothing, and which do."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.loop.numbers import ENOUGH, Numbers
from membudget.loop.situation import Situation
from tests.loop.training import live_bytes


class Timed(nn.Module):
    """Is called with a time, a name, and how often its layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(
        self, x: Tensor, time: Any = 1.0, name: str = "", repeats: int = 1
    ) -> Tensor:
        for _ in range(repeats):
            x = self.layers(x)
        return x * time


def trained(*calls: dict[str, Any], rows: int = 2) -> tuple[list[str], list[int]]:
    """Train on some calls; return what a user is warned of, and uses of situations."""
    model = Timed()
    with (
        warnings.catch_warnings(record=True) as caught,
        mb.budget(model, "1GiB") as fitted,
    ):
        warnings.simplefilter("always")
        for call in calls:
            model(torch.ones(call.pop("rows", rows), 8), **call).sum().backward()
            model.zero_grad()
    texts = [str(w.message) for w in caught if w.category is mb.BudgetWarning]
    return texts, [s.uses for s in fitted.status().situations]


@pytest.mark.parametrize(
    "call",
    [
        lambda step: {"time": 0.5 * step},
        lambda step: {"time": step},
        lambda step: {"time": np.float64(step)},
        lambda step: {"name": f"sample {step}"},
        lambda step: {"time": step, "name": f"sample {step}"},
    ],
    ids=["float", "int", "numpy", "string", "both"],
)
def test_values_that_decide_nothing_make_no_further_situations(call):
    texts, uses = trained(*(call(step) for step in range(12)))
    assert not texts
    assert len(uses) == ENOUGH
    assert uses[0] == 12 - ENOUGH + 1


def test_values_that_decide_nothing_at_one_size_decide_nothing_at_another():
    calls = [{"time": 0.5 * step} for step in range(6)]
    calls += [{"time": 0.3 * step, "rows": 4} for step in range(6)]
    _, uses = trained(*calls)
    assert sorted(uses) == [1, 1, 1, 3, 6]


def test_a_value_that_was_never_compared_is_recorded_once():
    calls = [{"time": step, "name": "a"} for step in range(6)]
    calls += [{"time": step, "name": "b"} for step in range(6)]
    calls += [{"time": step, "name": "c"} for step in range(6)]
    _, uses = trained(*calls)
    assert uses == [13, 1, 1, 1, 1, 1]


def test_the_same_value_recorded_again_is_not_compared():
    numbers = Numbers()
    told = ((int, 1), (str, "a"))
    situation = Situation((told, ()), (2, 8))
    numbers.look(situation.kind)
    for _ in range(2 * ENOUGH):
        numbers.compare(situation, lambda: "as always")
    other = Situation((((int, 2), (str, "a")), ()), (2, 8))
    assert numbers.stand_in(other, is_measured=True) is other


def test_where_nothing_is_measured_each_value_is_planned_for():
    numbers = Numbers()
    calls = [
        Situation((((float, step / 2),), ()), (2, 8)) for step in range(ENOUGH + 1)
    ]
    for call in calls[:ENOUGH]:
        numbers.look(call.kind)
        numbers.compare(call, lambda: "as always")
    assert numbers.stand_in(calls[-1], is_measured=False) is calls[-1]
    assert numbers.stand_in(calls[-1], is_measured=True) == calls[0]
    assert numbers.doubt()
    assert numbers.stand_in(calls[-1], is_measured=True) is calls[-1]
    assert not numbers.doubt()


def test_a_number_that_decides_what_runs_makes_a_situation_each_and_is_warned_of_once():
    (text,), uses = trained(*({"repeats": step} for step in range(1, 11)))
    assert text.startswith("the model was called with 8 different numbers or strings")
    assert uses == [1] * 10


def test_a_value_that_decides_beside_one_that_does_not_makes_a_situation_each():
    """The second call differs from the first in both; the third tells which decides."""
    calls = [{"time": step, "repeats": 1 + step % 2} for step in range(24)]
    texts, uses = trained(*calls)
    assert not texts
    assert uses == [9, 9, *[1] * 2 * (ENOUGH - 1)]


def test_many_numbers_that_decide_are_warned_of_beside_a_string_that_does_not():
    calls = [{"repeats": 1 + step % 3, "name": "ab"[step % 2]} for step in range(12)]
    calls += [{"repeats": step, "name": "a"} for step in range(4, 10)]
    texts, uses = trained(*calls)
    assert len(texts) == 1
    assert uses == [3] * 3 + [1] * 9


def test_a_number_that_decides_late_is_planned_for_again_once_the_budget_is_exceeded():
    class Late(Timed):
        def forward(self, x: Tensor, time: Any = 1.0, *_: Any) -> Tensor:
            return super().forward(x, repeats=9 if time >= 6 else 1)

    model = Late()

    def train(*steps: int) -> None:
        for step in steps:
            model.zero_grad()
            model(torch.ones(512, 8), step).sum().backward()

    with mb.budget(model, live_bytes() + 250_000) as fitted:
        train(*range(6))
        with pytest.warns(mb.BudgetWarning, match="more than .* decide something, and"):
            train(6, 7)
        train(0)
    first, *_, last = fitted.status().situations
    assert len(fitted.status().situations) == ENOUGH + 1
    assert first.worst_bytes < last.worst_bytes


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)])
def test_other_sizes_and_tensors_make_no_warning(number):
    calls = [{"time": rows * number, "rows": rows} for rows in range(1, 5)]
    calls += [{"time": number, "rows": rows} for rows in range(5, 10)]
    texts, _ = trained(*calls)
    assert not texts


@pytest.mark.parametrize("late", [100, 7], ids=["decides nothing", "decides late"])
def test_weights_are_those_of_the_plain_loop_whatever_the_numbers_decide(late):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                *(
                    nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), last)
                    for last in (nn.Linear(128, 32) for _ in range(4))
                )
            )

        def forward(self, x: Tensor, step: int, scale: float) -> Tensor:
            for _ in range(2 if step >= late else 1):
                x = self.inner(x) * scale
            return x

    def trained(budget: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        under = nullcontext() if budget is None else mb.budget(model, budget)
        with warnings.catch_warnings(), under as fitted:
            warnings.simplefilter("ignore", mb.BudgetWarning)  # A late number exceeds.
            for step in range(12):
                model(
                    torch.randn(256, 32), step, 1 / (1 + step)
                ).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if fitted is not None:
            first = fitted.status().situations[0]
            assert first.uses == min(12, late + 1) - ENOUGH + 1
            assert first.slowdown > 1
        return [*(p.detach() for p in model.parameters()), torch.get_rng_state()]

    plain = trained(None)
    assert all(weights.isfinite().all() for weights in plain)
    assert all(map(torch.equal, plain, trained(live_bytes() + 1_200_000)))


def test_values_whose_recordings_differ_from_time_to_time_are_all_planned_for():
    """What decides then is not among the arguments."""
    numbers = Numbers()
    calls = [Situation((((int, step),), ()), (2, 8)) for step in range(9)]
    for call in calls[:ENOUGH]:
        numbers.look(call.kind)
        numbers.compare(call, lambda: "as always")
    assert numbers.stand_in(calls[-1], is_measured=True) == calls[0]
    numbers.compare(calls[0], lambda: "otherwise")
    assert numbers.stand_in(calls[-1], is_measured=True) is calls[-1]
