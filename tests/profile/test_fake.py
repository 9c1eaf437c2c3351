"""Fake steps: what is computed for real, what is rejected, what is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile as torch_profile

import membudget as mb
from membudget._torch import is_profiling
from membudget.memory.peak import quiet_stderr
from membudget.profile import profile


class Asks(nn.Module):
    """A layer, and a function that is asked of its output."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.function(y)
        return y


ASKING: list[Any] = [
    lambda y: y.sum().item(),
    lambda y: float(y.sum()),
    lambda y: bool(y.sum() > 0),
    lambda y: y.detach().tolist(),
    lambda y: y[y > 0],
    lambda y: torch.equal(y, y),
    lambda y: y.nonzero(),
    pytest.param(
        lambda y: y.detach().numpy(),
        marks=pytest.mark.xfail(strict=True, reason="a RuntimeError passes as it is"),
    ),
]


@pytest.mark.parametrize("function", ASKING)
def test_code_that_needs_values_is_rejected_with_the_user_s_line(function):
    line = function.__code__.co_firstlineno

    with pytest.raises(mb.OptionError, match=rf"^test_fake\.py:{line} asks a fake"):
        profile(Asks(function), torch.randn(2, 4), fake=True)


def test_values_of_integer_tensors_can_be_read():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            longest = int((tokens > 0).sum(1).max())
            x = self.embed(tokens[:, :longest])
            return x[:, torch.arange(longest).flip(0)]

    tokens = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]])

    graph = profile(Model(), tokens, fake=True, device="h100").graph

    assert (2, 3, 4) in {value.shape for value in graph.values}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randperm(5),
        lambda: torch.randint(5, (3,)),
        lambda: torch.full((3,), 2),
        lambda: torch.zeros(3, dtype=torch.int32),
        lambda: torch.tril_indices(3, 3),
    ],
    ids=["randperm", "randint", "full", "zeros", "tril_indices"],
)
def test_values_of_integers_that_the_step_makes_can_be_read(
    make: Callable[[], Tensor],
):
    profile(Asks(lambda x: int(make().max())), torch.randn(2, 4), fake=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randint(0, 10, (1 << 40,), dtype=torch.int64),
        lambda: torch.arange(0, 1 << 40, dtype=torch.int64),
        lambda: torch.arange(-(1 << 40), 0),
        lambda: torch.full((1 << 40,), 1),
    ],
    ids=["randint", "arange", "negative-arange", "full"],
)
def test_integers_too_large_for_memory_stay_fake(make: Callable[[], Tensor]):
    def function(x: Tensor) -> Tensor:
        return x * make()[0]

    found = profile(Asks(function), torch.randn(2, 4), fake=True)

    assert found.peak_bytes > 1 << 40


class Writes(nn.Module):
    """Write into one of its tensors: a buffer, an attribute, the batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.zeros(4, dtype=dtype))
        self.loose = torch.zeros(4, dtype=dtype)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            for tensor in (self.buffer, self.loose, target):
                assert isinstance(tensor, Tensor)
                tensor.logical_not_() if tensor.dtype is torch.bool else tensor.add_(1)
        return self.linear(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("where", ["buffer", "loose", "batch"])
def test_a_fake_step_leaves_real_tensors_unchanged(dtype, where):
    model, target = Writes(dtype), torch.zeros(4, dtype=dtype)

    profile(model, (torch.randn(2, 4), target), fake=True, device="h100")

    tensors: dict[str, Any] = {
        "buffer": model.buffer,
        "loose": model.loose,
        "batch": target,
    }
    assert torch.equal(tensors[where], torch.zeros(4, dtype=dtype))


def test_the_batch_counter_of_a_norm_is_not_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    profile(model, torch.randn(3, 4), fake=True, device="h100")

    assert model[1].num_batches_tracked == 0


@pytest.mark.cpu_only("a model on `meta` is taken to be on the CPU")
def test_models_of_fake_and_of_meta_tensors_are_profiled_alike():
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    with FakeTensorMode():
        fake = make()
    x = torch.randn(3, 4)
    peaks = {
        profile(model, x, fake=True, device="h100").peak_bytes
        for model in (make(), make().to("meta"), fake)
    }

    assert len(peaks) == 1
    assert profile(fake, x).tensors == "fake"
    assert profile(make().to("meta"), x.to("meta")).peak_bytes in peaks


def test_a_real_profile_of_a_meta_model_is_rejected():
    with pytest.raises(mb.OptionError, match=r"on `meta`.*pass fake=True"):
        profile(nn.Linear(4, 4, device="meta"), torch.randn(2, 4), fake=False)


@contextmanager
def profiler() -> Iterator[torch_profile]:
    """Run torch's profiler, and none of its notes to stderr."""
    outer = torch_profile()
    with quiet_stderr():
        outer.__enter__()
    try:
        yield outer
        assert is_profiling()
    finally:
        with quiet_stderr():
            outer.__exit__(None, None, None)


def test_a_real_profile_under_a_profiler_is_rejected():
    with profiler(), pytest.raises(mb.OptionError, match="a profiler is running"):
        profile(nn.Linear(4, 4), torch.randn(2, 4))


@pytest.mark.cpu_only("kernels of the CPU alone are tried for their workspaces")
def test_a_fake_profile_under_a_profiler_tries_no_kernel():
    model, x = nn.Conv2d(4, 8, 3), torch.randn(2, 4, 9, 9)
    tried = profile(model, x, fake=True, device="h100")

    with profiler() as outer:
        x.sin()
        found = profile(model, x, fake=True, device="h100")
        x.cos()

    names = [event.name for event in outer.function_events or ()]
    assert names.index("aten::sin") < names.index("aten::cos")
    assert any(o.workspace_bytes for o in tried.graph.operators)
    assert not any(o.workspace_bytes for o in found.graph.operators)
    assert [n for n in found.notes if n not in tried.notes] == [
        "a profiler was running, so no kernel was tried; workspaces count as 0"
    ]
