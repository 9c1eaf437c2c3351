"""Row B3: `fit` takes the step that people have.

A pair `(inputs, targets)` was spread over the model's arguments, so a loss of torch
never worked; there was no step form, and neither a loader nor a LightningModule could
be given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import membudget as mb
from membudget.errors import OptionError

X, Y = torch.randn(64, 16), torch.randint(4, (64,))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout()) for _ in "abc"]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


class TakesTwo(nn.Module):
    """A model that can be called with one argument or with two."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        output: Tensor = self.net(x * scale)
        return output


class Lightning(nn.Module):
    """What Lightning calls: `training_step`, which returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, number: int) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x), y)}


def plain_loss(model: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(1)
    return F.cross_entropy(model(X), Y)


def check(fitted: mb.Fitted, model: nn.Module, body: nn.Module) -> None:
    """Check that the plan is on the model, and changes no bit of the user's step."""
    assert fitted.plan.regions
    found = plain_loss(body)
    found.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert all(not r.differences for r in fitted.status().regions)
    fitted.remove()
    expected = plain_loss(body)
    expected.backward()
    assert torch.equal(found, expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


LOSSES: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "functional": F.cross_entropy,
    "function": lambda output, targets: F.cross_entropy(output, targets),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_row_b03_a_pair_of_inputs_and_targets_is_a_batch(loss_fn):
    model = net()
    check(mb.fit(model, (X, Y), "60%", loss_fn), model, model)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_row_b03_a_loss_of_torch_is_given_the_targets_alone(loss_fn):
    model = TakesTwo()
    check(mb.fit(model, [X, Y], "60%", loss_fn), model, model)


def test_row_b03_a_function_of_output_and_batch_is_still_given_both():
    model = TakesTwo()

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        assert len(batch) == 2
        return output.square().mean() * batch[1].sum()

    mb.fit(model, (X, torch.ones(64, 1)), "60%", loss_fn).remove()


def test_row_b03_a_loader_gives_its_first_batch_and_moves_no_random_stream():
    model = net()
    loader = DataLoader(TensorDataset(X, Y), 64, shuffle=True)
    before = torch.get_rng_state()
    fitted = mb.fit(model, loader, "60%", nn.CrossEntropyLoss())

    assert torch.equal(before, torch.get_rng_state())
    check(fitted, model, model)


def test_row_b03_an_empty_loader_is_refused():
    with pytest.raises(OptionError, match="the DataLoader is empty"):
        mb.fit(net(), DataLoader(TensorDataset(X[:0]), 4), "60%", nn.CrossEntropyLoss())


def test_row_b03_a_step_of_the_user_is_fitted():
    model = net()
    step = lambda: F.cross_entropy(model(X), Y).backward()  # noqa: E731
    fitted = mb.fit(step, modules=model, budget="60%")

    assert fitted.audit().equal
    check(fitted, model, model)


def test_row_b03_a_lightning_module_is_fitted_by_its_training_step():
    model = Lightning()
    check(mb.fit(model, (X, Y), "60%"), model, model.net)


@pytest.mark.parametrize(
    ("model", "loss_fn", "calls"),
    [
        (net(), lambda output, targets: output @ targets, r"model\(inputs\) and loss_"),
        (TakesTwo(), lambda output, batch: output / 0 @ batch, r"model\(\*batch\) and"),
    ],
    ids=["taken-for-a-pair", "taken-for-arguments"],
)
def test_row_b03_a_batch_of_two_that_fails_shows_the_call_and_both_ways(
    model, loss_fn, calls
):
    with pytest.raises(OptionError, match=calls) as error:
        mb.fit(model, (X, Y[:, None]), "60%", loss_fn)

    assert "(float32[64, 16], int64[64, 1])" in str(error.value)
    assert "loss_fn(model(inputs), targets).backward()" in str(error.value)
    assert "loss_fn(model(*batch), batch).backward()" in str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: mb.fit(model),
        lambda model: mb.fit(lambda: None, X, modules=model),
        lambda model: mb.fit(lambda: None, modules=model, loss_fn=F.mse_loss),
    ],
    ids=["no-batch", "step-and-batch", "step-and-loss"],
)
def test_row_b03_what_is_no_step_is_refused(call):
    with pytest.raises(OptionError, match=r"\(step, modules=model\)"):
        call(net())


def test_row_b03_a_second_fit_replaces_the_plan_of_the_first():
    model = net()
    mb.fit(model, X, "60%")
    fitted = mb.fit(model, (X, Y), "80%", nn.CrossEntropyLoss())

    check(fitted, model, model)


def test_row_b03_a_second_fit_that_fails_leaves_the_plan_of_the_first():
    model = net()
    fitted = mb.fit(model, X, "60%")
    with pytest.raises(mb.BudgetError, match="no plan fits"):
        mb.fit(model, X, 100)

    model(X).sum().backward()
    assert any(region.forwards for region in fitted.status().regions)


def test_row_b03_a_region_keeps_the_signature_of_the_forward():
    import inspect

    model = TakesTwo()
    before = inspect.signature(model.forward)
    applied = mb.apply(model, blocks=TakesTwo)

    assert inspect.signature(model.forward) == before
    applied.remove()
