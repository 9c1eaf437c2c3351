"""Behaviours 18-20: every kind of callable, of output view and of keyword."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.steps import Region, differences, perceptron, plain


class Methods(nn.Module):
    """One computation behind every kind of callable."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return self(x) * factor

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x.sin().exp()

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return cls.static(x).cos()


CALLABLES: dict[str, Callable[[Methods], Callable[..., Any]]] = {
    "module": lambda m: m,
    "bound method": lambda m: m.forward,
    "partial of a bound method": lambda m: functools.partial(m.scaled, factor=2.0),
    "partial of a partial": lambda m: functools.partial(
        functools.partial(m.scaled), factor=2.0
    ),
    "lambda": lambda m: lambda x: m(x) * 2,
    "static method": lambda m: m.static,
    "class method": lambda m: m.of_class,
    "class with __call__": lambda m: Doubled(m),
    "builtin of torch": lambda m: torch.tanh,
    "method of a tensor": lambda m: Tensor.sigmoid,
}


class Doubled:
    """A callable that is no function."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x).sin() * 2


@pytest.mark.parametrize("kind", CALLABLES)
def test_b18_every_kind_of_callable_works(kind: str) -> None:
    def step(region: Region) -> Any:
        model, x = Methods(), torch.randn(4, 6, requires_grad=True)
        y = region(CALLABLES[kind](model), x.exp())
        y.sum().backward()
        return y, x, model

    assert differences(step) == []


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda h: h.view(-1)[2:],
    "transposed": lambda h: h.t(),
    "chunks": lambda h: h.chunk(2),
    "view and its base": lambda h: (h, h[0]),
    "expanded": lambda h: h[:1].expand(3, 4),
    "diagonal written into": lambda h: _written(h, h.diagonal()),
    "row written into": lambda h: _written(h, h[1]),
    "written view returned": lambda h: _written(h[:2], h[0]),
}


def _written(result: Tensor, view: Tensor) -> Tensor:
    view.mul_(3)
    return result


@pytest.mark.parametrize("kind", VIEWS)
def test_b19_views_may_be_outputs_and_may_be_written_into_inside(kind: str) -> None:
    def step(region: Region) -> Any:
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        result = region(lambda x: VIEWS[kind]((x * w).sin() * 2), x)
        outputs = result if isinstance(result, tuple) else (result,)
        sum(output.square().sum() for output in outputs).backward()
        return result, x, w

    assert differences(step) == []


def test_b19_a_view_of_the_input_may_be_an_output() -> None:
    def step(region: Region) -> Any:
        x = torch.randn(4, 4, requires_grad=True)
        h = x.exp()
        row, y = region(lambda h: (h[1], h.sin().exp()), h)
        assert row.untyped_storage().data_ptr() == h.untyped_storage().data_ptr()
        (row.sum() + y.sum()).backward()
        return row, y, x

    assert differences(step) == []


OPTION_NAMES = [
    "use_reentrant",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "preserve_rng_state",
    "guards",
    "function",
]


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_b20_the_curried_form_leaves_every_keyword_to_the_function(name: str) -> None:
    # torch 2.13 has no curried form: it takes its options out of the function's own
    # keywords, and refuses `function` as given twice.
    def function(x: Tensor, **named: Tensor) -> Tensor:
        assert list(named) == [name]
        return (x * named[name]).sin().exp()

    def step(region: Region) -> Any:
        x, scale = (torch.randn(3, requires_grad=True) for _ in range(2))
        if region is plain:
            y = function(x, **{name: scale})
        else:
            y = mb.checkpoint(early_stop=False)(function)(x, **{name: scale})
        y.sum().backward()
        return y, x, scale

    assert differences(step) == []


def test_b20_the_curried_form_is_a_decorator_with_options() -> None:
    calls = []

    # torch 2.13: `checkpoint` wants the function first.
    @mb.checkpoint(early_stop=False)
    def function(x: Tensor) -> Tensor:
        calls.append("begun")
        y = x.sin().exp()
        calls.append("ended")
        return y

    x = torch.randn(3, requires_grad=True)
    function(x).sum().backward()
    assert calls == ["begun", "ended"] * 2
