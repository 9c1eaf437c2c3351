"""A replay region records fake tensors as it records real ones, and allocates nothing.

So a region can be tried on a model that does not fit: its operators, what a policy
would keep, and the shapes of the gradients are known without its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from membudget.engine.candidate import Answer
from membudget.engine.options import Verify
from membudget.engine.policy import as_policy
from membudget.policies import Candidate
from tests.keeps import KEEPS, replay

WIDTH = 64


class _Convolved(nn.Module):
    """Convolution, normalisation, an activation in place, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x[None, None])), inplace=True)
        return F.avg_pool2d(self.second(x), 2).flatten(1).sin()


class _Written(nn.Module):
    """Writes: into memory without content, through views, over what was read."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x).copy_(x.detach()).exp_()
        y.t().narrow(0, 2, 4).mul_(3)
        z = (x * 2).sin().mul_(y)
        return z.cos() * y.sort(-1).values


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, 8)
    )


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 128, dropout=0.1, batch_first=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": _perceptron,
    "attention": _attention,
    "convolved": _Convolved,
    "written": _Written,
}


@dataclass(frozen=True)
class Step:
    """What a step did.

    Attributes:
        asked: The outputs that the policy was asked about, numbers and operators.
        backward: The operators that ran in the backward, replays among them.
        shapes: The shapes of the output and of all gradients.
    """

    asked: list[str]
    backward: list[str]
    shapes: list[tuple[int, ...]]


class Log(TorchDispatchMode):
    """Note the operators that run, in order, but for those that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note an operator and run it."""
        # A fake tensor asks for its own device by an operator.
        if func.namespace != "prim" and func is not torch.ops.aten.detach.default:
            # A reshape of fake tensors takes the way of tensor subclasses.
            self.names.append(str(func).replace("._reshape_alias.", ".view."))
        return func(*args, **(kwargs or {}))


def step_of(make: Callable[[], nn.Module], keep: Any, verify: Verify = False) -> Step:
    """Run a step."""
    asked: list[str] = []
    policy = as_policy(keep)

    def remembered(candidate: Candidate) -> Answer:
        asked.append(f"{candidate.index} {candidate.operator}")
        return policy.keeps(candidate)

    model, x = make(), torch.randn(16, WIDTH, requires_grad=True)
    y = replay(remembered, verify=verify)(model)(x)
    with Log() as log:
        y.sum().backward()
    tensors = [y, x.grad, *(p.grad for p in model.parameters())]
    shapes = [tuple(t.shape) for t in tensors if t is not None]
    return Step(asked, log.names, shapes)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("model", MODELS)
def test_a_fake_step_records_and_replays_what_a_real_one_does(
    model: str, keep: str
) -> None:
    real = step_of(MODELS[model], KEEPS[keep])
    with FakeTensorMode():
        fake = step_of(MODELS[model], KEEPS[keep])

    assert fake.shapes == real.shapes
    assert fake.asked == real.asked
    assert fake.backward == real.backward


@pytest.mark.parametrize("verify", [True, "fingerprints"])
@pytest.mark.parametrize("model", MODELS)
def test_a_fake_step_is_verified_without_a_warning(model: str, verify: Verify) -> None:
    with FakeTensorMode():
        step_of(MODELS[model], KEEPS["nothing"], verify=verify)


def test_fake_tensors_are_recorded_outside_of_their_mode() -> None:
    mode = FakeTensorMode()
    with mode:
        model, x = _perceptron(), torch.randn(16, WIDTH, requires_grad=True)

    y = replay(verify=True)(model)(x)
    y.sum().backward()

    assert isinstance(y, FakeTensor)
    assert isinstance(x.grad, FakeTensor)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("model", MODELS)
def test_a_fake_step_allocates_nothing(model: str, keep: str) -> None:
    def step() -> Any:
        with FakeTensorMode():
            return step_of(MODELS[model], KEEPS[keep])

    step()  # A first use may make tables.
    measured = mb.peak(step)

    # The states of random streams are no activations: 5,056 bytes each.
    assert measured.peak_bytes < 16 * WIDTH * 4 * 4


def test_a_model_of_more_bytes_than_any_machine_has_is_recorded() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(2**20, 2**20), nn.Tanh())
        x = torch.empty(2**30, 2**20, requires_grad=True)
        replay()(model)(x).sum().backward()

    assert x.grad is not None
    assert x.grad.shape == x.shape
