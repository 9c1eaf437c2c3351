"""How an audit is asked for, which modules and loss it takes, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.audit import audit, default_names


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


class Lists(nn.Module):
    """Blocks in a list of lists, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(linear(), linear())
        self.blocks = nn.ModuleList(
            nn.ModuleList([linear(), linear()]) for _ in range(3)
        )


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.act = nn.Tanh()
        self.second = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(linear(), nn.Tanh()), ["0", "1"]),
        (
            lambda: nn.Sequential(linear(), nn.Sequential(*(linear(), linear()) * 2)),
            ["1.0", "1.1"],
        ),
        (
            lambda: nn.Sequential(
                linear(), nn.Sequential(linear(), linear(), linear())
            ),
            ["1.0", "1.1", "1.2"],
        ),
        (
            lambda: nn.Sequential(
                *(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2))
            ),
            ["0", "1"],
        ),
        (
            Lists,
            [f"blocks.{i}.{j}" for i in range(3) for j in range(2)],
        ),
        (Direct, ["first", "second"]),
    ],
    ids=["sequential", "shared", "inner", "like-blocks", "lists", "no-list"],
)
def test_the_longest_list_of_blocks_gets_the_regions(make, names):
    assert default_names(make()) == names


def test_a_model_with_nothing_to_choose_from_is_refused():
    with pytest.raises(mb.SelectionError, match="Linear has no ModuleList"):
        audit(nn.Linear(4, 4), torch.ones(1, 4))


def test_a_selection_is_that_of_apply():
    model = nn.Sequential(*(linear() for _ in range(5)))

    def audited(**selection: Any) -> list[str]:
        report = audit(model, torch.ones(1, 4), **selection)
        return [region.name for region in report.regions or ()]

    assert audited() == ["0", "1", "2", "3", "4"]
    assert audited(every=2) == ["0", "2", "4"]
    assert audited(names="[13]") == ["1", "3"]
    assert audited(blocks=nn.Linear, where=lambda name, _: name > "2") == ["3", "4"]


def test_a_wrong_selection_or_option_is_refused_before_the_step_runs():
    model = nn.Sequential(linear())
    model.register_forward_hook(lambda *_: pytest.fail("the step ran"))

    with pytest.raises(mb.SelectionError, match="matches names=\\['nothing'\\]"):
        audit(model, torch.ones(1, 4), names="nothing")
    with pytest.raises(mb.OptionError, match="never"):
        audit(model, torch.ones(1, 4), determinism_check="never")


def test_a_selection_for_a_model_that_carries_regions_is_refused():
    model = nn.Sequential(linear(), linear())
    mb.apply(model, names="0")

    with pytest.raises(mb.OptionError, match=r"carries regions already.*names, every"):
        audit(model, torch.ones(1, 4), names="1", every=2)


def test_regions_inside_the_model_are_plain_in_the_plain_run():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Tensor:
            return mb.checkpoint(lambda x: self.layer(x).tanh(), x)

    model: Any = nn.Sequential(Inner(), Inner())
    ran: list[bool] = []
    model[0].layer.register_forward_hook(lambda *_: ran.append(mb.is_recomputing()))

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()

    assert audit(plain=step, budgeted=step, modules=model).equal
    assert ran == [False, False, False, True]


@dataclass
class Batch:
    x: Tensor


class Takes(nn.Module):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        TAKEN.append((args, kwargs))
        (first, *_) = [*args, *kwargs.values()]
        x = first if isinstance(first, Tensor) else getattr(first, "x", None)
        return self.layer(first[0] if x is None else x)


TAKEN: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("batch", "args", "keywords"),
    [
        (X, 1, 0),
        ((X, 1), 2, 0),
        ({"x": X, "labels": None}, 0, 2),
        (Batch(X), 1, 0),
        ([X, X], 1, 0),
    ],
    ids=["tensor", "tuple", "dict", "dataclass", "list"],
)
def test_a_batch_is_given_to_the_model_as_its_kind_says(batch, args, keywords):
    TAKEN.clear()

    assert audit(Takes(), batch).equal
    assert [(len(a), len(k)) for a, k in TAKEN] == [(args, keywords)] * 3


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh())
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layers(x))


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda y: y.sum(), "the model's output"),
        (lambda y: {"loss": y.sum(), "logits": y}, "output['loss']"),
        (lambda y: Output(y.sum(), y), "output.loss"),
        (lambda y: y, "the sum of the output's 1 floating tensor,"),
        (lambda y: Output(None, y), "the sum of the output's 1 floating tensor,"),
        (lambda y: [y, {"a": y.double(), "b": y.argmax()}], "the output's 2 floating"),
    ],
)
def test_a_loss_is_found_in_the_output_and_the_report_says_where(make, where):
    report = audit(Returns(make), X)

    assert report.equal
    assert where in report.loss_from
    assert where in str(report)
    assert report.compared.gradients == 2


def test_a_loss_function_is_called_with_output_and_batch():
    model = nn.Sequential(linear(), nn.Tanh())
    batch = {"input": X}

    report = audit(model, batch, lambda output, b: (output - b["input"]).square().sum())

    expected = (model(X) - X).square().sum()
    assert report.loss_from == "loss_fn(output, batch)"
    assert float(report.loss) == pytest.approx(expected.item())


def test_parameters_of_the_loss_function_are_compared():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, output: Tensor, batch: Tensor) -> Tensor:
            return ((output - batch) * self.scale).square().sum()

    assert audit(nn.Sequential(linear()), X, Scaled()).compared.gradients == 3


@pytest.mark.parametrize(
    ("make", "loss_fn", "message"),
    [
        (lambda y: y.argmax(), None, "returned no floating tensor"),
        (lambda y: "text", None, "no floating tensor to make a loss of, but str"),
        (lambda y: y, lambda y, _: y, r"it returned \[2, 4\]"),
        (lambda y: y, lambda y, _: 1.0, "it returned float"),
    ],
)
def test_an_output_that_makes_no_loss_is_refused(make, loss_fn, message):
    with pytest.raises(mb.OptionError, match=message):
        audit(Returns(make), X, loss_fn)


def test_an_audit_is_of_a_model_or_of_a_step_and_not_of_both():
    call: Any = audit
    model = nn.Sequential(linear())
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        ((model,), {}),
        ((model,), {"plain": 1}),
        ((model, X), {"modules": model}),
        ((model, X), {"plain": 1, "budgeted": 2}),
        ((), {"plain": print, "budgeted": print, "names": "*"}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(mb.OptionError, match=r"audit\(model, batch"):
            call(*args, **kwargs)
    with pytest.raises(mb.OptionError, match="must be a Module; got int"):
        call(1, X)
    with pytest.raises(mb.OptionError, match="name the modules"):
        call(plain=print, budgeted=print)


def test_two_models_are_compared_by_the_names_of_their_parameters():
    plain = nn.Sequential(linear(), nn.Tanh())
    other = nn.Sequential(linear(), nn.Tanh())

    def step(model: nn.Module) -> Tensor:
        loss = model(X).sum()
        loss.backward()
        return loss

    with pytest.raises(mb.OptionError, match=r"do not begin equal.*0\.weight"):
        audit(step, plain=plain, budgeted=other)

    other.load_state_dict(plain.state_dict())
    mb.apply(other, names=["0", "1"])
    report = audit(step, plain=plain, budgeted=other)

    assert report.equal
    assert report.regions_ran == 2
    assert report.compared.gradients == 2


def test_a_step_without_backward_is_said_so():
    report = audit(torch.sin, plain=X, budgeted=X, modules=())

    assert "does the step call backward()" in str(report)
    assert report.regions_ran is None
