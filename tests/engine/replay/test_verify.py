"""What is verified once and for all, and what verification keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import policies
from membudget.engine.controls import verification_postponed
from membudget.engine.replay import verify
from membudget.engine.replay.verify import Verified, verified
from tests.devices import array, device_type
from tests.keeps import replay
from tests.oracles import CountedOperators


@pytest.fixture(autouse=True)
def nothing_verified() -> Iterator[None]:
    """Let each test begin with nothing verified, and leave nothing behind."""
    before = dict(verify._VERIFIED)
    verify._VERIFIED.clear()
    yield
    verify._VERIFIED.clear()
    verify._VERIFIED.update(before)


def of(function: Any = torch.sin, *args: Any, **kwargs: Any) -> Any:
    return verified(policies.nothing, function, args, kwargs)


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
        verified(policy, torch.sin, (X,), {})
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
    monkeypatch.setattr(verify, "_MOST_KEYS", 3)
    first, *others = (of(torch.sin, X, number) for number in range(4))
    assert len(verify._VERIFIED) == 3
    assert [of(torch.sin, X, number) for number in range(1, 4)] == others
    assert of(torch.sin, X, 0) is not first


def test_a_signature_begins_without_pins():
    assert of(torch.sin, X).unrepeatable == set()


@pytest.fixture(scope="module")
def noisy() -> Iterator[Callable[[Tensor], Any]]:
    """Return an operator of three outputs, the second of which never comes back."""
    with torch.library._scoped_library("membudget_verify", "FRAGMENT") as library:
        library.define("noisy(Tensor x) -> (Tensor, Tensor, Tensor)")
        stream = np.random.default_rng(0)

        def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            noise = torch.from_numpy(stream.random(tuple(x.shape), dtype=np.float32))
            return x * 2, x + noise, x * 3

        library.impl("noisy", run, "CPU")
        yield torch.ops.membudget_verify.noisy.default


class Noisy(torch.autograd.Function):
    """The operator, as autograd meets it."""

    operator: Callable[[Tensor], Any]
    # Of the forwards; a list that a region can reach would make each call another.
    outputs: list[tuple[Tensor, ...]]

    @staticmethod
    def forward(ctx, x):
        found = Noisy.operator(x)
        Noisy.outputs.append(tuple(t.clone() for t in found))
        return found

    @staticmethod
    def backward(ctx, *gradients):
        return 2 * gradients[0] + gradients[1] + 3 * gradients[2]


def function(x: Tensor) -> Tensor:
    return sum(t.sin() for t in Noisy.apply(x)).sum()


def gradient_of(outputs: tuple[Tensor, ...]) -> Tensor:
    first, second, third = outputs
    return 2 * first.cos() + second.cos() + 3 * third.cos()


def test_the_output_that_does_not_come_back_is_kept_and_no_other(noisy):
    Noisy.operator, Noisy.outputs = noisy, []
    region = replay(verify=True)(function)
    x = torch.linspace(0, 1, 4, requires_grad=True)
    with pytest.warns(mb.UnrepeatableWarning, match="output 1 of operator") as caught:
        loss = region(x)
    assert len(caught) == 1
    # Later steps are not verified: they keep what the first one found.
    for step in range(3):
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(gradient, gradient_of(Noisy.outputs[step]))
        loss = region(x)


def test_fingerprints_name_the_output_that_does_not_come_back(noisy):
    Noisy.operator, Noisy.outputs = noisy, []
    region = replay(verify="fingerprints")(function)
    x = torch.linspace(0, 1, 4, requires_grad=True)
    with pytest.raises(mb.RecomputeMismatchError, match="output 1 of operator"):
        torch.autograd.grad(region(x), x)
    for step in range(1, 3):
        (gradient,) = torch.autograd.grad(region(x), x)
        assert torch.equal(gradient, gradient_of(Noisy.outputs[step]))


def test_fingerprints_name_all_outputs_that_do_not_come_back_at_once(noisy):
    Noisy.operator, Noisy.outputs = noisy, []

    def twice(x: Tensor) -> Tensor:
        return function(x) + function(x.cos())

    region = replay(verify="fingerprints")(twice)
    x = torch.linspace(0, 1, 4, requires_grad=True)
    loss = region(x)
    with pytest.raises(mb.RecomputeMismatchError, match="output 1 of operator") as seen:
        torch.autograd.grad(loss, x)
    assert str(seen.value).count("output 1 of operator") == 2
    torch.autograd.grad(region(x), x)  # Both are kept from now on.


def test_hooks_around_the_region_get_what_is_kept_because_it_did_not_come_back(noisy):
    Noisy.operator, Noisy.outputs = noisy, []
    region = replay(verify=True)(function)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, pytest.warns(mb.UnrepeatableWarning, match="output 1 of operator"):
        loss = region(x)
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, gradient_of(Noisy.outputs[0]))
    assert any(torch.equal(tensor, Noisy.outputs[0][1]) for tensor in packed)


class Paths:
    """A function of two paths, of which the short one begins as the long one does.

    On the short one something is written where no dispatcher sees it.
    """

    def __init__(self) -> None:
        self.is_long = True

    def __call__(self, x: Tensor) -> Tensor:
        y = x * 2
        if not self.is_long:
            array(y.detach())[:] += 1
        z = y.sin()
        return z.cos() if self.is_long else z


def test_a_path_that_ends_inside_of_another_one_is_verified_the_next_time():
    paths = Paths()
    region = replay(verify=True)(paths)
    x = torch.linspace(0, 1, 4, requires_grad=True)
    region(x)
    paths.is_long = False
    region(x)  # Up to here it could have been the other path.
    with pytest.warns(mb.UnrepeatableWarning, match="output 0 of operator 1"):
        region(x)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(region(x).sum(), x)
        assert torch.equal(gradient, 2 * (x.detach() * 2 + 1).cos())


def test_a_mode_of_the_user_does_not_see_the_comparison():
    x = torch.ones(3, requires_grad=True)

    def work(x: Tensor) -> Tensor:
        return x.sin().exp() * 2

    with CountedOperators() as plain:
        work(x)
    with CountedOperators() as verified:
        replay(verify=True)(work)(x)
    assert (
        verified.counts.total() > plain.counts.total()
    )  # It sees what is recomputed for it.
    assert verified.counts.keys() == plain.counts.keys()


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
