"""What is verified once and for all, and what verification keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine.replay import verified
from tests.devices import array
from tests.keeps import replay
from tests.oracles import CountedOperators


@pytest.fixture(autouse=True)
def nothing_verified() -> Iterator[None]:
    """Let each test begin with nothing verified, and leave nothing behind."""
    before = dict(verified.VERIFIED)
    verified.VERIFIED.clear()
    yield
    verified.VERIFIED.clear()
    verified.VERIFIED.update(before)


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
    with CountedOperators() as checked:
        replay(verify=True)(work)(x)
    assert (
        checked.counts.total() > plain.counts.total()
    )  # It sees what is recomputed for it.
    assert checked.counts.keys() == plain.counts.keys()
