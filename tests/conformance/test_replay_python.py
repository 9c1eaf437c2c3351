"""What is Python in a replay region runs once: in the forward.

The function, the hooks of its modules and the policy do not run again in a backward,
and the first step of a signature alone is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget import policies
from membudget.engine.replay import accelerated, native_replayer
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tape import Operation
from tests.keeps import replay

Function = Callable[[Tensor], Any]


def once(y: Tensor) -> None:
    """Send an output backward."""
    y.sum().backward()


def twice(y: Tensor) -> None:
    """Send an output backward through the same graph twice."""
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def chain(x: Tensor) -> Tensor:
    """Save the input, an output, an input and an output."""
    return x.sin().exp().cos().tanh()


def _input(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), requires_grad=True)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def calls_in(step: Callable[[Function], None]) -> int:
    """Count how often a step calls the function that it is given."""
    calls: list[None] = []

    def function(x: Tensor) -> Tensor:
        calls.append(None)
        return chain(x)

    step(function)
    return len(calls)


def test_the_function_runs_once() -> None:
    assert calls_in(lambda f: once(replay()(f)(_input()))) == 1
    assert calls_in(lambda f: twice(replay()(f)(_input()))) == 1
    assert calls_in(lambda f: once(replay(verify=True)(f)(_input()))) == 1


def test_the_hooks_of_modules_run_once() -> None:
    model, ran = _layers(), Counter[str]()
    for layer in (model, *model):
        layer.register_forward_pre_hook(lambda *_: ran.update(["before"]))
        layer.register_forward_hook(lambda *_: ran.update(["after"]))
        layer.register_full_backward_hook(lambda *_: ran.update(["backward"]))

    once(replay()(model)(_input()))

    assert ran == {"before": 4, "after": 4, "backward": 4}


def test_a_normalisation_counts_its_batches_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    counter: Any = model.get_buffer("1.num_batches_tracked")

    for _ in range(3):
        twice(replay()(model)(_input()))

    assert int(counter) == 3


def test_a_policy_is_asked_in_the_forward_alone_and_once_for_each_output() -> None:
    asked: list[str] = []

    def keep(candidate: policies.Candidate) -> bool:
        asked.append(candidate.operator.overloadpacket.__name__)
        return False

    y = replay(keep)(lambda x: chain(x).t()[1:])(_input())
    assert asked == ["sin", "exp", "cos", "tanh"]  # Not about the views.
    twice(y)
    assert asked == ["sin", "exp", "cos", "tanh"]


def test_a_first_step_of_a_signature_is_verified_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # To be counted, by frames that Python makes.
    monkeypatch.setattr(native_replayer, "NativeReplayer", Replayer)
    monkeypatch.setattr(accelerated, "EXTENSION", [])
    names: list[str] = []
    run = Replayer._run

    def noted(self: Replayer, operation: Operation) -> None:
        names.append(str(operation.operator))
        run(self, operation)

    monkeypatch.setattr(Replayer, "_run", noted)

    def sines(x: Tensor, verify: bool) -> int:
        names.clear()
        replay(verify=verify)(chain)(x)
        return names.count("aten.sin.default")

    shapes = [(5, 6), (5, 6), (7, 6), (5, 6)]
    verified = [sines(_input(*shape), verify=True) for shape in shapes]
    unverified = [sines(_input(*shape), verify=False) for shape in shapes]

    assert [v - u for v, u in zip(verified, unverified, strict=True)] == [1, 0, 1, 0]
