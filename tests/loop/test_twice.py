"""A backward pass that keeps its graph is foreseen as it begins, with the next one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import membudget as mb
from membudget.loop.call_recorder import CallRecorder
from membudget.loop.twice import TwiceStep
from tests.loop.training import counted, live_bytes
from tests.loops.models import MODELS, inputs_of, loss_of

Loop = Callable[[nn.Module, Tensor, Tensor], None]


def adapted(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Train through a step of gradient descent (MAML)."""
    named = dict(model.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):  # The others have no second derivative.
        loss = loss_of(model(inputs), targets)
        inner = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        changed = {
            name: parameter - 0.1 * gradient
            for (name, parameter), gradient in zip(named.items(), inner, strict=True)
        }
        loss_of(functional_call(model, changed, (inputs,)), targets).backward()


def penalised(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Keep the gradient of the inputs small, as of a WGAN's critic."""
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    (slope.square().mean() + loss_of(output, targets)).backward()


CASES = [
    pytest.param("language", adapted, marks=pytest.mark.slow),
    pytest.param("recurrent", adapted, marks=pytest.mark.slow),
    pytest.param("images", penalised, marks=pytest.mark.slow),
    ("mixed", penalised),
]


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, *inputs_of(name, model, 16)


def train(loop: Loop, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    torch.manual_seed(0)  # For dropout.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        loop(model, inputs, targets)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("name", "loop"), CASES)
def test_a_loop_through_gradients_keeps_its_budget_or_is_refused(name, loop):
    with counted() as seen:
        plain = made(name)
        train(loop, *plain)
    limits = [seen.most_bytes // 2]
    while len(limits) < 6:
        with counted() as seen:
            found = made(name)
            try:
                with mb.budget(found[0], limits[-1]):
                    train(loop, *found)
                break
            except mb.BudgetError as error:
                limits.append(error.least_bytes)
        del found
    assert len(limits) > 1
    assert seen.most_bytes <= limits[-1]
    assert all(map(torch.equal, plain[0].parameters(), found[0].parameters()))


def test_a_refusal_begins_no_backward_pass_and_names_what_is_kept():
    model, inputs, targets = made("mixed")
    with counted() as seen:
        loss_of(model(inputs), targets).backward()
    model.zero_grad()
    with (
        pytest.raises(mb.BudgetError, match="whose backward pass keeps its graph") as e,
        mb.budget(model, seen.most_bytes),
    ):
        penalised(model, inputs, targets)
    assert e.value.least_bytes > seen.most_bytes
    assert "The plain one is predicted to take" in str(e.value)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loop_through_gradients_may_run_with_a_warning():
    plain, found = made("mixed"), made("mixed")
    train(penalised, *plain)
    with (
        warnings.catch_warnings(record=True) as caught,
        mb.budget(found[0], 500_000, on_exceed="warn"),
    ):
        warnings.simplefilter("always")
        train(penalised, *found)
    texts = [str(warning.message) for warning in caught]
    assert any("whose backward pass keeps its graph" in text for text in texts)
    assert all(map(torch.equal, plain[0].parameters(), found[0].parameters()))


def recorded_by(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, name: str
) -> list[TwiceStep]:
    """Return the backward passes that are recorded while a loop runs."""
    steps: list[TwiceStep] = []
    recorded = CallRecorder.recorded

    def noting(self: CallRecorder, step, optimizer=None):
        if isinstance(step, TwiceStep):
            steps.append(step)
        return recorded(self, step, optimizer)

    monkeypatch.setattr(CallRecorder, "recorded", noting)
    found = made(name)
    with mb.budget(found[0], "1GiB"):
        train(loop, *found)
    return steps


def test_other_backward_passes_are_not_recorded_again(monkeypatch):
    def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        loss_of(model(inputs), targets).backward()

    assert not recorded_by(monkeypatch, plain, "mixed")


def test_the_gradients_that_are_asked_for_are_recorded_alone(monkeypatch):
    (step,) = recorded_by(monkeypatch, penalised, "mixed")
    count = len(list(MODELS["mixed"]().parameters()))
    assert step._asked == [False] * count + [True]
    (step,) = recorded_by(monkeypatch, adapted, "recurrent")
    assert step._asked == [True] * (len(step._asked) - 1) + [False]


def test_a_call_that_is_recorded_is_no_call_of_the_loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Tanh())
    with mb.budget(model, "1GiB") as fitted:
        weights = list(model.parameters())
        total = model(torch.arange(8)).square().sum()  # Integers are never fake.
        slopes = torch.autograd.grad(total, weights, create_graph=True)
        torch.stack([slope.square().sum() for slope in slopes]).sum().backward()
    assert [situation.uses for situation in fitted.status().situations] == [1]


def test_a_refused_backward_pass_leaves_no_cycle_around_what_it_kept():
    model, inputs, _ = made("mixed")
    inputs.requires_grad_()
    limit = live_bytes() + 400_000
    gc.disable()
    try:
        with suppress(mb.BudgetError), mb.budget(model, limit):
            total = model(inputs).sum()
            kept = ref(total)
            torch.autograd.grad(total, inputs, create_graph=True)
            raise AssertionError("it was not refused")
        del total
        assert kept() is None
    finally:
        gc.enable()


class Skipping(nn.Module):
    """Skips its layer at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.skipped: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.skipped.append(bool(torch.rand(()) < 0.5))
        return x.sin() if self.skipped[-1] else self.layer(x).sin()


def test_chance_is_set_in_the_step_of_a_backward_pass_that_keeps_its_graph():
    model, x = Skipping(), torch.ones(2, 4, requires_grad=True)
    drawn: list[int] = []
    step = TwiceStep(model, (x,), {}, [False, False, True])
    step.on_draw = lambda: drawn.append(1)
    for letter in "LS" * 4:
        step.draws = letter
        step.run()
    assert model.skipped == [False, True] * 4
    assert len(drawn) == 8


def test_a_sparse_argument_is_trained_with_as_before():
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.second(torch.sparse.mm(edges, self.first(x).relu()))

    def trained(around: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Graph(), torch.randn(3, 4)
        edges = torch.eye(3).to_sparse()
        with warnings.catch_warnings(), around(model):
            warnings.simplefilter("ignore", mb.BudgetWarning)
            model(x, edges).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = trained(lambda model: nullcontext())
    found = trained(lambda model: mb.budget(model, "1GiB"))
    assert all(map(torch.equal, plain, found))
