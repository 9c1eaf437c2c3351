"""How an audit is asked for, which modules and loss it takes, and what it says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_overloads

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.audit import audit


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


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
def test_a_batch_is_passed_to_the_model_by_its_type(batch, args, keywords):
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
        (lambda y: y, "the sum of the output's 1 floating-point tensor (no"),
        (
            lambda y: Output(None, y),
            "the sum of the output's 1 floating-point tensor (no",
        ),
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
        (lambda y: y.argmax(), None, "without a floating-point tensor"),
        (lambda y: "text", None, "returned a str without a floating-point"),
        (lambda y: y, lambda y, _: y, r"it returned \[2, 4\]"),
        (lambda y: y, lambda y, _: 1.0, "it returned float"),
    ],
)
def test_an_output_without_a_loss_is_rejected(make, loss_fn, message):
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
    with pytest.raises(mb.OptionError, match="pass the modules"):
        call(plain=print, budgeted=print)


def test_each_form_of_an_audit_has_the_defaults_of_the_function():
    of_function = inspect.signature(audit).parameters
    forms = get_overloads(audit)
    assert len(forms) == 3
    for form in forms:
        for name, parameter in inspect.signature(form).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                assert parameter.default == of_function[name].default, name


def test_two_models_are_compared_by_the_names_of_their_parameters():
    plain = nn.Sequential(linear(), nn.Tanh())
    other = nn.Sequential(linear(), nn.Tanh())

    def step(model: nn.Module) -> Tensor:
        loss = model(X).sum()
        loss.backward()
        return loss

    with pytest.raises(mb.OptionError, match=r"differ before the step.*0\.weight"):
        audit(step, plain=plain, budgeted=other)

    other.load_state_dict(plain.state_dict())
    mb.apply(other, names=["0", "1"])
    report = audit(step, plain=plain, budgeted=other)

    assert report.equal
    assert report.regions_ran == 2
    assert report.compared.gradients == 2


def test_a_step_without_a_backward_pass_is_reported():
    report = audit(torch.sin, plain=X, budgeted=X, modules=())

    assert "does the step call backward()" in str(report)
    assert report.regions_ran is None


@pytest.mark.parametrize(
    ("count", "is_list", "names"),
    [
        (1, False, ["weight", "bias"]),
        (1, True, ["weight", "bias"]),
        (
            2,
            True,
            [f"modules[{i}].{name}" for i in (0, 1) for name in ("weight", "bias")],
        ),
    ],
)
def test_the_parameters_of_several_modules_are_named_by_their_number(
    count, is_list, names
):
    layers = [linear() for _ in range(count)]

    def step(scale: float) -> None:
        sum(layer(X).sum() * scale for layer in layers).backward()

    modules = layers if is_list else layers[0]
    report = audit(step, plain=1.0, budgeted=2.0, modules=modules)
    assert [d.name for d in report.differences] == names


def test_models_that_differ_only_in_what_is_not_registered_are_compared():
    plain, other = (
        nn.Sequential(linear(), nn.Tanh()),
        nn.Sequential(linear(), nn.Tanh()),
    )
    other.load_state_dict(plain.state_dict())
    plain.cache, other.cache = torch.ones(2), torch.zeros(2)

    def step(model: nn.Module) -> None:
        model(X).sum().backward()

    report = audit(step, plain=plain, budgeted=other)
    assert [d.name for d in report.differences] == ["cache"]

    nn.init.zeros_(other[0].weight)  # type: ignore[arg-type]
    nn.init.ones_(other[0].bias)  # type: ignore[arg-type]
    with pytest.raises(mb.OptionError, match=r"0\.weight.*\(2 differences in all\)"):
        audit(step, plain=plain, budgeted=other)


def test_two_functions_are_compared_by_what_they_return():
    model = nn.Sequential(linear())
    report = audit(plain=lambda: (1, X), budgeted=lambda: (2, X), modules=model)
    assert [(d.kind, d.plain, d.other) for d in report.differences] == [
        ("output", "1", "2")
    ]
    assert report.compared.outputs == 1
    assert report.regions is None


class Ignores(nn.Module):
    """Makes its output of a parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh())

    def forward(self, batch: None) -> Tensor:
        assert batch is None
        return self.layers(X)


def test_none_is_a_batch_and_a_variant_like_any_other():
    model = Ignores()
    assert audit(model, None).compared.gradients == 2

    def step(variant: None) -> None:
        model(variant).sum().backward()

    report = audit(step, plain=None, budgeted=None, modules=model)
    assert report.compared.gradients == 2
