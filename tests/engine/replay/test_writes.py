"""Operators that write their arguments, inside of replay regions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine import native
from tests.keeps import replay

Function = Callable[..., Tensor]


@pytest.fixture(scope="module")
def advance() -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Return an operator that adds to its state and returns something fresh.

    What it returns depends on what the state was before.
    """
    with torch.library._scoped_library("membudget_writing", "FRAGMENT") as library:
        library.define("advance(Tensor(a!) state, Tensor x) -> Tensor")

        def run(state: Tensor, x: Tensor) -> Tensor:
            before = state.clone()
            state.add_(1)
            return x * before

        library.impl("advance", run, "CPU")
        yield torch.ops.membudget_writing.advance.default


class Advance(torch.autograd.Function):
    """The operator, as autograd meets it."""

    operator: Callable[[Tensor, Tensor], Tensor]

    @staticmethod
    def forward(ctx, state, x):
        return Advance.operator(state, x)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def step(function: Function, region: Callable[[Function], Function]) -> list[Tensor]:
    """Return the gradients of two steps, and the state that they leave."""
    state, x = torch.full((3,), 2.0), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    found = []
    for _ in range(2):
        (gradient,) = torch.autograd.grad(region(function)(state, x).sum(), x)
        found.append(gradient)
    return [*found, state]


def unchanged(function: Function) -> Function:
    return function


def test_what_an_operator_returns_beside_its_write_is_made_from_what_was_there(advance):
    Advance.operator = advance

    def function(state: Tensor, x: Tensor) -> Tensor:
        return Advance.apply(state, x).sin().exp()

    expected = step(function, unchanged)
    for found, wanted in zip(step(function, replay()), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_state_that_is_made_inside_is_written_again_before_it_is_read(advance):
    Advance.operator = advance

    def function(state: Tensor, x: Tensor) -> Tensor:
        inner = state * 2
        first = Advance.apply(inner, x)
        second = Advance.apply(inner, first)
        return (second * inner).sin().exp()

    expected = step(function, unchanged)
    for found, wanted in zip(step(function, replay()), expected, strict=True):
        assert torch.equal(found, wanted)


def test_nested_regions_count_one_version_a_write_through_a_list():
    def function(x: Tensor) -> Tensor:
        base = x * 2
        parts = [base[0], base[1]]
        before = [part._version for part in parts]
        torch._foreach_add_(parts, 1.0)
        seen.append([p._version - b for p, b in zip(parts, before, strict=True)])
        return torch.stack(parts).sin().exp()

    def nested(x: Tensor) -> Tensor:
        return mb.checkpoint(function, x, engine="replay").cos()

    x = torch.ones(2, 3, requires_grad=True)
    seen: list[list[int]] = []
    (expected,) = torch.autograd.grad(function(x).cos().sum(), x)
    (once,) = torch.autograd.grad(replay()(function)(x).cos().sum(), x)
    (found,) = torch.autograd.grad(replay()(nested)(x).sum(), x)
    assert torch.equal(once, expected)
    assert torch.equal(found, expected)
    plain, *others = seen
    assert others == [plain, plain]


def test_a_view_of_what_is_written_later_is_recomputed_as_it_was_read():
    def function(state: Tensor, x: Tensor) -> Tensor:
        made = x * 0.5
        view = made[:2]
        before = (view + 1).sin().sum()
        made.add_(state)
        made[1:].mul_(2.0)
        return (before * made * view.sum()).sin()

    expected = step(function, unchanged)
    for found, wanted in zip(step(function, replay()), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kept", range(1, 12))
def test_a_view_is_right_whichever_operator_s_output_is_kept(kept):
    def function(state: Tensor, x: Tensor) -> Tensor:
        made = x * 0.5
        view = made[1:]
        view.mul_(3.0)
        other = made[:2]
        product = (other + 1).sin() * (view + 2)
        other.add_(1.0)
        return (product.sum() * made * view.sum() + other.sum()).cos().exp()

    expected = step(function, unchanged)
    region = replay(lambda candidate: candidate.index == kept)
    for found, wanted in zip(step(function, region), expected, strict=True):
        assert torch.equal(found, wanted)


def normalise(state: Tensor, x: Tensor) -> Tensor:
    """Normalise; the running statistics are two parts of the state."""
    mean, variance = state[:3], state[3:]
    y = (x + mean).sin()
    y = nn.functional.batch_norm(y, mean, variance, training=True)
    return y.exp() * (x - variance).cos()


@pytest.mark.parametrize("offset", [0, 1])
def test_a_normalisation_updates_statistics_that_are_parts_of_one_buffer(offset):
    x = torch.linspace(0, 1, 6).view(2, 3).requires_grad_()

    def steps(region: Callable[[Function], Function]) -> list[Tensor]:
        state = torch.linspace(1, 2, 6 + offset)[offset:]
        found = []
        for _ in range(2):
            y = region(normalise)(state, x).sum()
            found += [y.detach(), *torch.autograd.grad(y, x)]
        return [*found, state]

    for found, wanted in zip(steps(replay()), steps(unchanged), strict=True):
        assert torch.equal(found, wanted)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.equal(one, other)


def test_normalisations_and_writes_to_what_is_held_are_recorded_in_cpp(seen):
    if not native.is_available():
        pytest.skip("there is no recorder in C++")
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.BatchNorm1d(3))
    twin = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    for policy in (mb.policies.everything, mb.policies.nothing):
        replay(policy)(model)(x).sum().backward()
        twin(x).sum().backward()
    assert not seen
    parameters = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(same(one.grad, other.grad) for one, other in parameters)
    buffers = zip(model.buffers(), twin.buffers(), strict=True)
    assert all(same(one, other) for one, other in buffers)


@pytest.mark.cpu_only("the profiler sees each clone of the emulated device twice")
def test_a_write_copies_each_source_that_it_destroys_once():
    def function(x: Tensor) -> Tensor:
        whole = x.detach().tanh()
        part = whole[:2]
        whole.mul_(1)
        y = (x * whole).sum() + (x[:2] * part).sum()
        whole.mul_(2)
        return y

    x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()
    region = replay(mb.policies.operators("tanh"))(function)
    with torch.autograd.profiler.profile(use_kineto=False) as found:
        y = region(x)
    # The whole and its part.
    assert [event.name for event in found.function_events].count("aten::clone") == 2
    (gradient,) = torch.autograd.grad(y, x)
    expected = x.detach().tanh()
    expected[:2] += expected[:2].clone()
    assert torch.equal(gradient, expected)


def test_a_normalisation_is_replayed_by_the_kernel_that_its_statistics_choose():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    statistics = torch.zeros(4, 2)
    norm.running_mean, norm.running_var = statistics.unbind(1)
    x = torch.randn(64, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        y: Tensor = norm(x.sin()).tanh().exp()
        return y

    (found,) = torch.autograd.grad(replay()(function)(x).sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.skipif(not native.is_available(), reason="Python's stack is its own")
def test_a_write_to_a_view_of_100000_views_is_replayed():
    def function(x: Tensor) -> Tensor:
        y = x * 2
        for _ in range(100_000):
            y = y[:]
        return y.add_(1).sin()

    x = torch.ones(3, requires_grad=True)
    (found,) = torch.autograd.grad(replay(verify=False)(function)(x).sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(found, expected)
