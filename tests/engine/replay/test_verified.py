"""Which calls share what was verified of them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from membudget import policies
from membudget.engine.controls import verification_postponed
from membudget.engine.options import DEFAULTS, RegionOptions
from membudget.engine.replay import verified as records
from membudget.engine.replay.verified import Verified, verified
from tests.devices import device_type


@pytest.fixture(autouse=True)
def nothing_verified() -> Iterator[None]:
    """Let each test begin with nothing verified, and leave nothing behind."""
    before = dict(records.VERIFIED)
    records.VERIFIED.clear()
    yield
    records.VERIFIED.clear()
    records.VERIFIED.update(before)


def of(function: Any = torch.sin, *args: Any, **kwargs: Any) -> Any:
    return verified(DEFAULTS, function, args, kwargs)


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def twice_closed_over(factor: float) -> Callable[[Any], Any]:
    inner = scaled(factor)
    return lambda x: inner(x)


class Model(nn.Module):
    def one(self) -> None: ...

    def other(self) -> None: ...


X = torch.ones(2, 3)

MODEL = Model()

ALIKE = {
    "values": ((torch.sin, X), (torch.sin, X * 2)),
    "strides": ((torch.sin, torch.ones(3, 3)), (torch.sin, torch.ones(3, 3).t())),
    "numbers": ((torch.sin, X, 3), (torch.sin, X, 3)),
    "closures": ((scaled(2.0), X), (scaled(2.0), X)),
    "closures of closures": ((twice_closed_over(2.0),), (twice_closed_over(2.0),)),
    "methods": ((MODEL.one, X), (MODEL.one, X)),
    "partials": (
        (functools.partial(torch.sin, out=None), X),
        (functools.partial(torch.sin, out=None), X),
    ),
    "lists": ((torch.stack, [X, X]), (torch.stack, [X, X * 3])),
    "dicts": ((len, {"a": X}), (len, {"a": X * 2})),
}

UNLIKE = {
    "functions": ((twice_closed_over(2.0), X), (scaled(2.0), X)),
    "shapes": ((torch.sin, X), (torch.sin, X[:1])),
    "dtypes": ((torch.sin, X), (torch.sin, X.double())),
    "devices": ((torch.sin, X), (torch.sin, X.to("meta"))),
    "gradients": ((torch.sin, X), (torch.sin, X.clone().requires_grad_())),
    "numbers": ((torch.sin, X, 3), (torch.sin, X, 4)),
    "kinds of numbers": ((torch.sin, X, 1), (torch.sin, X, True)),
    "closures": ((scaled(2.0), X), (scaled(3.0), X)),
    "closures of closures": ((twice_closed_over(2.0),), (twice_closed_over(3.0),)),
    "models": ((MODEL, X), (Model(), X)),
    "methods": ((MODEL.one, X), (MODEL.other, X)),
    "owners of methods": ((MODEL.one, X), (Model().one, X)),
    "partials' arguments": (
        (functools.partial(torch.mul, 2), X),
        (functools.partial(torch.mul, 3), X),
    ),
    "partials' keywords": (
        (functools.partial(torch.sum, dim=0), X),
        (functools.partial(torch.sum, dim=1), X),
    ),
    "partials' functions": (
        (functools.partial(scaled(2.0)), X),
        (functools.partial(scaled(3.0)), X),
    ),
    "lengths": ((torch.stack, [X]), (torch.stack, [X, X])),
    "lists and tuples": ((torch.stack, [X]), (torch.stack, (X,))),
    "items": ((torch.stack, [X]), (torch.stack, [X.double()])),
    "keys": ((len, {"a": X}), (len, {"b": X})),
    "arguments": ((torch.sin, X), (torch.sin, X, X)),
}


@pytest.mark.parametrize("case", ALIKE)
def test_calls_that_compute_alike_share_what_was_verified(case):
    one, other = ALIKE[case]
    assert of(*one) is of(*other)


@pytest.mark.parametrize("case", UNLIKE)
def test_calls_that_may_compute_otherwise_are_verified_apart(case):
    one, other = UNLIKE[case]
    assert of(*one) is not of(*other)
    assert of(*one) is of(*one)


@pytest.mark.parametrize("numbers", [(3, 4), (0.5, 0.25), (True, False)])
def test_with_sampling_numbers_but_not_choices_share_what_was_verified(numbers):
    sampled = RegionOptions(verify=0.01)
    one, other = (verified(sampled, torch.sin, (X, n), {}) for n in numbers)
    assert (one is other) == (type(numbers[0]) is not bool)
    assert one.sampling is not None
    assert one.sampling.is_due  # As the second size, or the first of its own.


def test_with_sampling_each_rank_is_verified_apart():
    sampled = RegionOptions(verify=0.01)
    shapes = [(1,) * rank for rank in range(2 * records._MOST_NUMBERS)]
    found = [verified(sampled, torch.sin, (torch.ones(s),), {}) for s in shapes]
    assert len(set(map(id, found))) == len(shapes)


@pytest.mark.parametrize("kind", [int, float])
def test_numbers_that_differ_in_each_call_share_what_was_verified_in_the_end(kind):
    found = [of(torch.sin, X, kind(n)) for n in range(40)]
    assert len(set(map(id, found))) == records._MOST_NUMBERS == len(records.VERIFIED)
    assert found[20] is found[-1]
    assert of(torch.sin, X, kind(3)) is found[3]
    assert of(torch.sin, X[:1], kind(3)) not in found


def test_keywords_are_told_apart_by_name_and_by_what_they_hold():
    assert of(torch.sum, X, dim=0) is of(torch.sum, X, dim=0)
    assert of(torch.sum, X, dim=0) is not of(torch.sum, X, dim=1)
    assert of(torch.sum, X, dim=0) is not of(torch.sum, X, axis=0)


def test_a_model_in_training_and_in_evaluation_is_verified_apart():
    model = Model()
    training = of(model, X)
    model.eval()
    assert of(model, X) is not training
    model.train()
    assert of(model, X) is training


def test_calls_under_autocast_are_verified_apart():
    plain = of(torch.sin, X)
    with torch.autocast(device_type(), torch.bfloat16):
        assert of(torch.sin, X) is not plain


def test_policies_are_verified_apart():
    found = [
        verified(RegionOptions(keep=policy), torch.sin, (X,), {})
        for policy in (policies.nothing, policies.everything, policies.nothing)
    ]
    assert found[0] is found[2]
    assert found[0] is not found[1]


def test_a_cell_that_is_still_empty_is_no_hindrance():
    def function(x: Any) -> Any:
        return later(x)

    before = of(function, X)
    later = torch.sin
    assert isinstance(before, Verified)
    assert of(function, X) is not before


def test_what_lies_too_deep_counts_by_its_type():
    deep = [[[[[1]]]]]
    other = [[[[[2]]]]]
    assert of(len, deep) is of(len, other)
    assert of(len, deep[0][0]) is not of(len, other[0][0])


def test_a_list_that_holds_itself_has_a_signature():
    endless: list[Any] = []
    endless.append(endless)
    assert of(len, endless) is of(len, endless)


def test_the_oldest_signature_is_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(records, "_MOST_KEYS", 3)
    first, *others = (of(torch.sin, X, number) for number in range(4))
    assert len(records.VERIFIED) == 3
    assert [of(torch.sin, X, number) for number in range(1, 4)] == others
    assert of(torch.sin, X, 0) is not first


def test_a_signature_is_forgotten_with_the_modules_that_it_names():
    model = Model()
    of(model.one, X)
    of(functools.partial(model.other), X)
    of(torch.sin, X)
    assert len(records.VERIFIED) == 3
    del model
    gc.collect()
    assert len(records.VERIFIED) == 1


def test_a_signature_begins_without_pins():
    assert of(torch.sin, X).unrepeatable == set()


def test_calls_are_sampled_at_powers_of_two():
    assert sampled(Verified(), 17) == [1, 2, 4, 8, 16]


def test_a_call_that_is_due_while_verification_is_postponed_is_sampled_afterwards():
    found = Verified()
    sampled(found, 3)
    with verification_postponed():
        assert sampled(found, 9) == []
    assert sampled(found, 5) == [1, 5]


def sampled(found: Verified, count: int) -> list[int]:
    """Count calls, and return the numbers of those that are sampled."""
    numbers = []
    for number in range(1, count + 1):
        found.count()
        if found.is_sampled:
            numbers.append(number)
    return numbers
