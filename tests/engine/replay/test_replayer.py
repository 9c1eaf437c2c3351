"""How often each operator is replayed, with stages and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb
from membudget.engine.candidate import Candidate
from membudget.engine.policy import Policy
from membudget.engine.stages import Stages
from tests.devices import settle
from tests.engine.replay.followed import Staged
from tests.oracles import CountedOperators


class Nothing(Policy):
    """Keeps nothing, and goes back at once."""

    def keeps(self, candidate: Candidate) -> bool:
        return False


def six(x: Tensor) -> Tensor:
    """Take six sines, each of which saves its input."""
    for _ in range(6):
        x = x.sin()
    return x


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        # All five that lead to the inputs of the others, once.
        (Nothing(), 5),
        # The last stage asks for the fourth and the fifth, the next for the second and
        # the third, and the first for the first one: each begins at the input.
        (Staged(set(), set(), set()), 5 + 3 + 1),
        # The last stage holds the second sine, where the next one goes on.
        (Staged(set(), set(), {(2, 0)}), 5 + 1 + 1),
        (Staged(set(), {(1, 0)}, {(2, 0)}), 5 + 1 + 1),
        (Staged(set(), {(1, 0)}, {(1, 0), (2, 0)}), 5 + 1),
        (Staged(set(), set(), {(2, 1), (9, 0)}), 5 + 3 + 1),
    ],
)
def test_a_stage_begins_where_the_last_one_held_something(policy, count):
    x = torch.linspace(0, 1, 3, requires_grad=True)
    y = mb.checkpoint(six, x, engine="replay", keep=policy, verify=False)
    with CountedOperators() as operators:
        (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(six(x).sum(), x)
    assert torch.equal(found, expected)
    assert operators.counts["sin"] == count


def test_a_second_backward_replays_as_much_as_the_first():
    x = torch.linspace(0, 1, 3, requires_grad=True)
    policy = Staged(set(), set(), {(2, 0)})
    y = mb.checkpoint(six, x, engine="replay", keep=policy, verify=False)
    with CountedOperators() as operators:
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)
    assert operators.counts["sin"] == 2 * (5 + 1 + 1)


class Living(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes before each sine which results of earlier ones live."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[StorageWeakRef] = []
        self.living: list[list[int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.sin.default:
            return func(*args, **(kwargs or {}))
        alive = [n for n, ref in enumerate(self.results, 1) if not ref.expired()]
        self.living.append(alive)
        output = func(*args)
        self.results.append(StorageWeakRef(output.untyped_storage()))
        return output


def test_what_a_stage_still_needs_is_gone_when_the_next_one_begins():
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        four = x
        for _ in range(4):
            four = four.sin()
        # Its backward never comes, so the fourth sine stays wanted.
        beside = four.tanh()
        return four.sin().sin(), beside

    x = torch.linspace(0, 1, 3, requires_grad=True)
    policy = Staged()
    policy.stages = Stages([(0, 0), (4, 0)], [set(), set()])
    y, beside = mb.checkpoint(function, x, engine="replay", keep=policy, verify=False)
    with Living() as living:
        torch.autograd.grad(y.sum(), x)
    assert len(living.results) == 5 + 3
    assert living.living[5] == []
    assert beside.requires_grad


def test_autograd_gets_a_view_of_a_kept_output_without_a_copy():
    weight = torch.randn(4, 6, requires_grad=True)

    def gated(x: Tensor) -> Tensor:
        value, gate = (x @ weight).chunk(2, -1)
        return value.sin() * gate

    x = torch.randn(5, 4, requires_grad=True)
    matmuls = mb.policies.matmuls
    y = mb.checkpoint(gated, x, engine="replay", keep=matmuls, verify=False)
    with CountedOperators() as operators:
        found = torch.autograd.grad(y.sum(), (x, weight))
    expected = torch.autograd.grad(gated(x).sum(), (x, weight))
    assert all(map(torch.equal, found, expected))
    assert operators.counts["clone"] == 0


def test_a_constant_in_the_shape_of_a_tensor_does_not_replay_it():
    def function(x: Tensor) -> Tensor:
        shape = x.sin()
        return x * torch.ones_like(shape) * shape.new_zeros(shape.shape)

    x = torch.randn(5, 4).t().requires_grad_()
    y = mb.checkpoint(function, x, engine="replay", keep=Nothing(), verify=False)
    with CountedOperators() as operators:
        (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert operators.counts["new_zeros"] == 1
    assert operators.counts["sin"] == 0


def test_what_a_backward_inside_unpacks_is_freed_with_its_graph():
    sines: list[StorageWeakRef] = []
    living: list[bool] = []

    def function(x: Tensor) -> Tensor:
        sine = x.sin()
        sines.append(StorageWeakRef(sine.untyped_storage()))
        total = sine.square().sum()
        del sine
        torch.autograd.grad(total, x, retain_graph=True)
        del total
        settle()
        living.append(not sines[-1].expired())
        return x * x

    x = torch.randn(5, requires_grad=True)
    keep = mb.policies.operators("sin")
    mb.checkpoint(function, x, engine="replay", keep=keep, verify=False)
    assert living == [False]
