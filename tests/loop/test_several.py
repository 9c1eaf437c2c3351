"""Models that are called on each other's outputs, and optimizers that call the loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.attach import has_region
from membudget.loop.step_needs import given_to, stepping
from membudget.memory import counting
from tests.loop.training import counted, live_bytes


def network() -> nn.Sequential:
    blocks = (
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        for _ in range(4)
    )
    return nn.Sequential(*blocks)


def chained(around: Callable[[list[nn.Module]], Any]) -> tuple[list[Tensor], int]:
    """Train a network on the outputs of another; return the weights, and the peak."""
    torch.manual_seed(0)
    models: list[nn.Module] = [network(), network()]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with counted() as seen, around(models):
        for _ in range(5):
            x = torch.randn(256, 64)
            models[1](models[0](x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in parameters], seen.most_bytes


def test_models_called_in_turn_find_room_for_each_other():
    before = live_bytes()
    plain, plain_bytes = chained(lambda _: nullcontext())
    limit = before + int(0.75 * (plain_bytes - before))
    found, peak_bytes = chained(lambda models: mb.budget(models, limit))
    assert all(map(torch.equal, plain, found))
    assert peak_bytes <= limit


def test_a_model_inside_another_needs_what_its_smallest_plan_is_asked_for():
    """Also if no plan is in force, which needs nothing beside its tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(n, nn.Dropout(0.1)) for n in network()))
    with mb.budget(model, "1GiB") as fitted:
        model(torch.randn(256, 64)).square().mean().backward()
    (root,) = fitted._roots
    ((situation, history),) = root.plans.histories.items()
    assert history.predicted is not None
    assert not history.predicted.decisions.choices
    smallest = root.plans.reference(situation).smallest(None)
    assert smallest.beside_bytes > history.predicted.beside_bytes == 0
    found = root.plans.room(situation)
    assert found.need_bytes == history.expected_bytes(smallest)
    assert found.spare_bytes == history.predicted.peak_bytes - smallest.peak_bytes > 0


def test_gradients_that_two_forwards_sum_are_expected_beside_those_there():
    """The weights take more than the activations, and so do their gradients."""
    torch.manual_seed(0)
    model = network()
    with counted(), mb.budget(model, "1GiB") as fitted:
        for _ in range(4):
            one, other = torch.randn(2, 16, 64)
            (model(one).square() + model(other).square()).mean().backward()
    (root,) = fitted._roots
    assert [s.uses for s in fitted.status().situations] == [1, 1, 3, 3]
    # In the first step, nobody knows that another forward follows.
    known = [*root.plans.histories.values()][2:]
    assert [history.correction_bytes for history in known] == [0, 0]
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    assert root.awaited.gradient_bytes(model, 0) == gradient_bytes
    assert root.awaited.gradient_bytes(model, 1) == gradient_bytes
    model.zero_grad()  # The last ones become those there.
    assert root.awaited.gradient_bytes(model, 1) == 0


def test_what_another_model_takes_later_is_no_part_of_a_micro_batch():
    def worst_bytes(rows: int) -> int:
        torch.manual_seed(0)
        model, other = network(), network()
        optimizer = torch.optim.AdamW(other.parameters())
        with mb.budget([model, other], "1GiB") as fitted:
            for _ in range(2):
                model(torch.randn(8, 64)).sum().backward()
                model.zero_grad()
                # This model's call ends the micro-batch before it, plan or none.
                with torch.set_grad_enabled(rows > 8):
                    other(torch.randn(rows, 64))
                other(torch.randn(rows, 64)).sum().backward()
                optimizer.step()
        return fitted.status().situations[0].worst_bytes

    assert worst_bytes(1024) == worst_bytes(8)


def test_a_step_with_a_closure_is_no_part_of_its_micro_batch():
    def worst_bytes(has_closure: bool) -> list[int]:
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def closure() -> Tensor:
            loss = model(torch.randn(8, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        with mb.budget(model, "1GiB", optimizer=optimizer) as fitted:
            for number in range(4):
                if not has_closure:
                    closure()
                    optimizer.step()
                elif number % 2:
                    optimizer.step(closure)
                else:
                    optimizer.step(closure=closure)
        return [s.worst_bytes for s in fitted.status().situations]

    assert worst_bytes(True) == worst_bytes(False)


def test_an_optimizer_may_be_wrapped():
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mb.budget(model, "1GiB", optimizer=Wrapping(optimizer)) as fitted:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
    assert not fitted.status().notes


def test_each_model_has_that_of_the_given_optimizers_which_steps_most_of_it():
    one, other = network(), network()
    weights = [p for p in one.parameters() if p.dim() > 1]
    rest = [p for p in one.parameters() if p.dim() == 1]
    optimizers = [
        torch.optim.SGD(rest[:2], lr=0.1),
        torch.optim.AdamW([*weights, rest[2]], lr=0.1),
        torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
    ]
    found = given_to([one, other], optimizers)
    assert found == optimizers[1:]
    assert given_to([one, other], optimizers[2]) == [None, optimizers[2]]
    assert given_to([one], None) == [None]
    master = torch.optim.SGD([torch.zeros(3)], lr=0.1)  # Of copies in float32, say.
    assert stepping([one], [*optimizers, master]) == optimizers[:2]
    with pytest.warns(mb.BudgetWarning, match=r"no optimizer .* is not foreseen"):
        assert stepping([one], [master]) == []
    assert stepping([one], []) == []


def test_a_second_optimizer_of_a_model_is_foreseen_when_it_first_steps():
    model = network()
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    given = torch.optim.SGD(rest, lr=0.1), torch.optim.AdamW(weights, lr=0.1)
    state_bytes = 2 * sum(p.nbytes for p in weights)
    limit = live_bytes() + 2 * sum(p.nbytes for p in model.parameters())
    with mb.budget(model, limit + state_bytes // 2, optimizer=given[0]):
        model(torch.randn(2, 64)).sum().backward()
        given[0].step()
        with pytest.raises(mb.BudgetError, match="the next step of AdamW needs"):
            given[1].step()
    assert not given[1].state


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SGD, "must be a torch.optim.Optimizer, or a list of them; got"),
        (["adam"], "got 'adam'"),
        (torch.optim.SGD([torch.zeros(1)]), "the SGD steps none of the parameters"),
    ],
)
def test_what_does_not_step_a_model_is_refused(optimizer, words):
    with pytest.raises(mb.OptionError, match=words):
        mb.budget(network(), "1GiB", optimizer=optimizer)


def doubled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a forward as accelerate's `prepare` does."""

    @wraps(forward)
    def run(x: Tensor) -> Tensor:
        return 2 * forward(x)

    return run


def test_a_model_and_a_part_of_it_are_refused():
    model = network()
    with pytest.raises(mb.OptionError, match="is part of another, Sequential"):
        mb.budget([model[0], model], "1GiB").start()


def test_no_model_at_all_is_refused():
    with pytest.raises(mb.OptionError, match="there is no model to plan for"):
        mb.budget([], "1GiB").start()


def test_a_model_given_twice_is_refused():
    model = network()
    with pytest.raises(mb.OptionError, match="one of the models is given twice"):
        mb.budget([model, network(), model], "1GiB").start()


def test_every_model_is_released_if_a_warning_at_the_end_is_an_error():
    models = [network(), network()]
    limit = live_bytes() + (4 << 20)
    with counted(), warnings.catch_warnings():
        warnings.simplefilter("error", mb.BudgetWarning)
        fitted = mb.budget(models, limit).start()
        for model in models:
            loss = model(torch.randn(8, 64)).sum()
            torch.empty(limit, dtype=torch.uint8)
            loss.backward()
        with pytest.raises(mb.BudgetWarning, match="more than were left for it"):
            fitted.stop()
        fitted.stop()
    for model in models:
        assert not any(map(has_region, model.modules()))
        assert type(model) is nn.Sequential
    assert counting._OPEN.isdisjoint(root._room.counted for root in fitted._roots)


def test_what_is_put_around_a_forward_may_outlive_the_budget():
    model = network()
    x = torch.randn(8, 64)
    plain = model(x)
    for number in range(2):
        with mb.budget(model, "1GiB") as fitted:
            if number == 0:
                model.forward = doubled(model.forward)  # type: ignore[method-assign]
            found = model(x)
            found.sum().backward()
        assert [s.uses for s in fitted.status().situations] == [1]
        assert torch.equal(found, 2 * plain)
    assert torch.equal(model(x), 2 * plain)
    assert type(model) is nn.Sequential
