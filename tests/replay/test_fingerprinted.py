"""Verification by fingerprints: it sees what is written unseen, and takes no memory.

The numbers are those of the rules in `engine.replay.fingerprinted`. That a right step
passes is shown on the zoo, in `tests/conformance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import policies
from membudget.engine.options import Verify
from membudget.engine.replay import fingerprinted, verified
from membudget.engine.replay.replayer import Replayer
from membudget.errors import RecomputeMismatchError
from membudget.memory import peak
from membudget.state import bits
from membudget.state.bits import fingerprint
from tests.devices import array
from tests.keeps import replay, replayed
from tests.oracles import assert_same_step, backward_once, plain, run_step
from tests.replay.operators import OPERATORS, OperatorCase

HIDDEN = [case for case in OPERATORS if case.hidden]

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_verified() -> None:
    """Forget what earlier tests verified, so that no test depends on another."""
    verified.VERIFIED.clear()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return what fingerprints are taken of, as they are."""
    seen: list[Tensor] = []

    def noted(tensor: Tensor) -> tuple[int, int]:
        seen.append(tensor.clone())
        return fingerprint(tensor)

    def compared(tensor: Tensor, before: tuple[int, int]) -> bool:
        seen.append(tensor.clone())
        return bits.has_changed(tensor, before)

    monkeypatch.setattr(fingerprinted, "content_of", noted)
    monkeypatch.setattr(fingerprinted, "has_changed", compared)
    return seen


def region(function: Function, keep: Any = policies.nothing) -> Function:
    return replay(keep, verify="fingerprints")(function)


def gradient(function: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


def ramp() -> Tensor:
    return torch.linspace(-1, 2, 30).view(5, 6)


WAY = replayed(policies.nothing, verify="fingerprints")


@pytest.mark.parametrize("case", HIDDEN, ids=str)
def test_a_hidden_write_raises_and_the_next_step_is_right(case: OperatorCase):
    with pytest.raises(RecomputeMismatchError, match="did not reproduce"):
        run_step(case, WAY, backward_once)

    assert_same_step(
        run_step(case, plain, backward_once), run_step(case, WAY, backward_once)
    )


def write_after_saving(x: Tensor) -> Tensor:
    y = x * 2
    z = y.sin()
    array(y.detach())[...] += 1
    return z.exp() * y


def write_and_let_go(x: Tensor) -> Tensor:
    y = (x * 2).exp()
    array(y.detach())[...] += 1
    z = y.sin()
    del y
    return z.cos() * x


def test_rule1_a_write_before_the_memory_goes_is_seen():
    again = region(write_and_let_go)
    with pytest.raises(RecomputeMismatchError, match="run the step again"):
        gradient(again, ramp())

    assert torch.equal(gradient(again, ramp()), gradient(write_and_let_go, ramp()))


def test_rule1_a_write_after_others_have_read_takes_another_step():
    # The second step keeps what was written, from which the sine is made again.
    again = region(write_after_saving)
    for wrong in (r"aten\.mul", r"aten\.exp"):
        with pytest.raises(RecomputeMismatchError, match=wrong):
            gradient(again, ramp())

    assert torch.equal(gradient(again, ramp()), gradient(write_after_saving, ramp()))


def test_rule1_the_fingerprint_is_of_what_the_memory_held_last(taken: list[Tensor]):
    def function(x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin()
        array(y.detach())[...] = 7
        return z

    with pytest.raises(RecomputeMismatchError, match="did not reproduce"):
        gradient(region(function), ramp())

    assert torch.equal(taken[0], torch.full_like(ramp(), 7))


def test_rule1_what_is_dropped_goes_before_the_next_operator():
    wide = torch.zeros(400, 400, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.sin()
        return x

    def forward(verify: Verify) -> int:
        return peak(lambda: replay(verify=verify)(function)(wide)).peak_bytes

    one_bytes, without = 400 * 400 * 4, forward(False)
    assert without == 2 * one_bytes
    assert forward("fingerprints") <= without + one_bytes // 2
    verified.VERIFIED.clear()
    assert forward(True) > 20 * one_bytes


def on_the_whole(model: nn.Module) -> mb.Applied:
    return mb.apply(
        model, where=lambda name, _: name == "", engine="replay", verify="fingerprints"
    )


def test_rule2_a_whole_step_takes_no_more_than_one_that_is_not_verified():
    pairs = [(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*(module for pair in pairs for module in pair))
    x = torch.randn(512, 256)
    on_the_whole(model)

    def step_bytes() -> int:
        model.zero_grad()
        return peak(lambda: model(x).sum().backward()).peak_bytes

    first, second = step_bytes(), step_bytes()
    assert first <= 1.01 * second


def test_rule2_each_value_is_compared_once(taken: list[Tensor]):
    x = ramp().clone().requires_grad_()
    y = region(lambda x: x.sin().exp().cos())(x)
    count = len(taken)
    assert count == 2  # What the sine reads is the argument, which is held.
    y.sum().backward(retain_graph=True)
    assert len(taken) == 4
    y.sum().backward()
    assert len(taken) == 4


def two_writes(x: Tensor) -> Tensor:
    a = (x + 1).exp()
    array(a.detach())[...] += 1
    b = (a.sin() * a).tanh()
    array(b.detach())[...] += 1
    return b.cos().exp()


def test_rule3_what_is_wrong_by_another_is_not_kept():
    again = region(two_writes)
    with pytest.raises(RecomputeMismatchError, match=r"aten\.exp") as first:
        gradient(again, ramp())
    assert "tanh" not in str(first.value)
    with pytest.raises(RecomputeMismatchError, match=r"aten\.tanh") as second:
        gradient(again, ramp())
    assert second.value.operator == "aten.exp.default"

    assert torch.equal(gradient(again, ramp()), gradient(two_writes, ramp()))


def test_rule3_all_that_is_at_fault_is_kept_at_once():
    def function(x: Tensor) -> Tensor:
        a, b = x.exp(), x.tanh()
        array(a.detach())[...] += 1
        array(b.detach())[...] += 1
        return a.sin() * b.cos()

    again = region(function)
    with pytest.raises(RecomputeMismatchError, match=r"aten\.tanh") as error:
        gradient(again, ramp())
    assert "aten.exp.default" in str(error.value)

    assert torch.equal(gradient(again, ramp()), gradient(function, ramp()))


def test_rule3_what_can_be_compared_is_named_where_another_recompute_fails(
    monkeypatch: pytest.MonkeyPatch,
):
    def function(x: Tensor) -> Tensor:
        a, b = x.exp(), x.tanh()
        array(a.detach())[...] += 1
        array(b.detach())[...] += 1
        return a.sin() * b.cos()

    def out_of_memory(*args: Any, **options: Any) -> Tensor:
        if options.get("stays"):
            raise MemoryError
        taken: Tensor = take(*args, **options)
        return taken

    take = Replayer.take
    monkeypatch.setattr(Replayer, "take", out_of_memory)
    with pytest.raises(RecomputeMismatchError, match=r"aten\.cos") as error:
        gradient(region(function), ramp())

    # Its inputs, which are at fault, could not be recomputed for a comparison.
    assert "aten.tanh" not in str(error.value)


def test_rule4_a_second_step_has_no_fingerprints(taken: list[Tensor]):
    again = region(lambda x: x.sin().exp())
    gradient(again, ramp())
    count = len(taken)
    assert count
    gradient(again, ramp())
    assert len(taken) == count
    gradient(again, ramp()[:2])  # Another signature.
    assert len(taken) == 2 * count


def test_rule4_a_backward_that_fails_has_verified_nothing(taken: list[Tensor]):
    again = region(lambda x: x.sin().exp().cos())

    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    x = ramp().clone().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        again(x).sum().backward()
    count = len(taken)

    gradient(again, ramp())
    assert len(taken) == 2 * count


def test_rule4_a_step_that_keeps_all_is_verified_at_once(taken: list[Tensor]):
    gradient(region(lambda x: x.sin().exp(), policies.everything), ramp())
    assert taken == []


def test_a_status_says_what_was_kept():
    class Unseen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return write_and_let_go(x)

    model = Unseen()
    applied = on_the_whole(model)
    with pytest.raises(RecomputeMismatchError, match="did not reproduce"):
        gradient(model, ramp())
    assert applied.status().regions[0].unrepeatable == 1
