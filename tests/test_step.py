"""One step: its loss, its errors, and what it may change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget.errors import OptionError
from membudget.step import ABSENT, CallableStep, Step, find_loss, step_of

X = torch.ones(2, 3)


def of_one(*shape: int) -> Tensor:
    return torch.full(shape, 5.0)


@pytest.mark.parametrize(
    ("output", "loss", "where"),
    [
        (of_one(), 5.0, "the model's output"),
        # A whole number is no loss, and neither is a tensor of one dimension.
        (torch.tensor(5), None, ""),
        (of_one(1), 5.0, "the sum of the output's 1 floating-point tensor (no loss_fn"),
        ({"loss": of_one(1, 1)}, 5.0, "output['loss']"),
        (
            {"loss": None, "y": X},
            6.0,
            "the sum of the output's 1 floating-point tensor (no",
        ),
        (
            {"loss": X, "y": X + 0},
            12.0,
            "the sum of the output's 2 floating-point tensors (no",
        ),
        (SimpleNamespace(loss=of_one(1)), 5.0, "output.loss"),
        (
            [X, X.double(), X.long()],
            12.0,
            "the sum of the output's 2 floating-point tensors",
        ),
        ([], None, ""),
    ],
)
def test_a_loss_is_found_in_what_a_model_returns(output, loss, where):
    if loss is None:
        with pytest.raises(
            OptionError, match="without a floating-point tensor, so there is no"
        ):
            find_loss(output)
        return
    found, told = find_loss(output)
    assert found.item() == loss
    assert found.shape == ()
    assert told.startswith(where)


class Lightning(nn.Linear):
    """A module whose `training_step` returns its second argument, and a loss."""

    def training_step(self, batch: Any, number: int) -> Any:
        return {"loss": self(batch).sum() + number}


class Returns(nn.Linear):
    def training_step(self, batch: Any, number: int) -> Tensor:
        return self(batch).sum() + number


def test_a_training_step_is_called_with_batch_and_number_0():
    model, step = Lightning(3, 3), Step(Lightning(3, 3), X, None)
    assert Step(model, X, None).forward().item() == model(X).sum().item()
    step.forward()
    assert step.loss_from == "output['loss']"
    step = Step(Returns(3, 3), X, None)
    step.forward()
    assert step.loss_from == "training_step"


def test_a_loss_function_goes_before_a_training_step():
    step = Step(Lightning(3, 3), X, lambda output, batch: output.sum() + batch.sum())
    assert step.loss_from == "loss_fn(output, batch)"
    assert step.forward().item() == (step.model(X).sum() + 6).item()
    assert step.loss_from == "loss_fn(output, batch)"
    pair = Step(nn.Linear(3, 3), (X, X), nn.MSELoss())
    assert pair.loss_from == "loss_fn(output, targets)"


def test_the_output_is_seen_before_the_loss_function_writes_into_it():
    seen: list[Tensor] = []
    step = Step(nn.Linear(3, 3), X, lambda output, _: output.mul_(0).sum())
    step.forward(lambda output: seen.append(output.detach().clone()))
    assert torch.equal(seen[0], step.model(X))


def test_between_the_passes_something_may_run():
    step, found = Step(nn.Linear(3, 3), X, None), []
    step.run(lambda: found.append(step.model.weight.grad))
    assert found == [None]
    assert step.model.weight.grad is not None


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, _: output, r"it returned \[2, 3\]"),
        (lambda output, _: 1.0, "it returned float"),
        (lambda output, _: output.detach().sum(), "does not require a gradient"),
    ],
)
def test_a_loss_without_a_backward_pass_is_refused(loss, words):
    with pytest.raises(OptionError, match=words):
        Step(nn.Linear(3, 3), X, loss).run()


def test_an_error_of_a_batch_of_two_says_how_it_was_called_and_others_pass():
    def fails(output: Tensor, batch: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(OptionError, match="failed with KeyError: 'mine'"):
        Step(nn.Linear(3, 3), (X, X), fails).run()
    with pytest.raises(KeyError, match="mine"):
        Step(nn.Linear(3, 3), (X,), fails).run()

    def is_short(output: Tensor, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        Step(nn.Linear(3, 3), (X, X), is_short).run()
    with pytest.raises(OptionError, match="loss_fn must return a tensor"):
        Step(nn.Linear(3, 3), (X, X), lambda *_: 1.0).run()  # type: ignore[arg-type]


def test_the_gradients_of_a_step_s_leaves_are_none_before_it():
    x, made = X.clone().requires_grad_(), (X.clone().requires_grad_() * 1)
    step = Step(nn.Linear(3, 3), {"x": x, "made": made, "plain": X}, None)
    assert [id(t) for t in step.leaves()] == [
        *map(id, step.model.parameters()),
        id(x),
    ]
    for leaf in step.leaves():
        leaf.grad = torch.ones_like(leaf)
    step.prepare()
    assert all(leaf.grad is None for leaf in step.leaves())


def test_a_step_names_what_it_may_change_and_the_tensors_of_its_batch():
    model, loss = nn.BatchNorm1d(3), nn.MSELoss()
    step = Step(model, (X, X + 1), loss)
    assert step.roots() == {"": model, "batch": step.batch, "loss_fn": loss}
    assert step.batch_tensors().keys() == {"batch[0]", "batch[1]"}
    assert len(list(step.tensors())) == 2 + 3 + 2
    assert Step(model, X, None).roots() == {"": model, "batch": X}
    assert Step(model, X, None).batch_tensors().keys() == {"batch"}


def test_a_step_of_the_user_is_the_function_itself():
    model = nn.Linear(3, 3)
    step = step_of(lambda: "done", ABSENT, None, model)
    assert isinstance(step, CallableStep)
    assert step.run(lambda: pytest.fail("called")) == "done"
    assert step.loss_from == "the step itself"
    assert step.roots() == {"": model}


def test_a_step_of_the_user_is_none_of_a_model_or_a_batch():
    model = nn.Linear(3, 3)
    for wrong in [(7, ABSENT, None, model), (print, X, None, model)]:
        with pytest.raises(OptionError, match="modules= is for a step function"):
            step_of(*wrong)
    with pytest.raises(OptionError, match="modules= is for a step function"):
        step_of(print, ABSENT, nn.MSELoss(), model)
    with pytest.raises(OptionError, match="give the batch"):
        step_of(model, ABSENT, None, None)
    with pytest.raises(OptionError, match=r"expected a torch\.nn\.Module.*got int"):
        step_of(print, ABSENT, None, 7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"'weight' has no shape yet"):
        step_of(print, ABSENT, None, nn.LazyLinear(2))
    assert step_of(model, None, None, None).batch is None
