"""Row B11: whatever fails in a region's life, the thread is left as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import _torch, _torch_observing, observer
from membudget.engine.replay.frame import ReplayFrame


class Failing(_torch.DispatchMode):
    """Fails at one of the operators that run, as an allocator would."""

    def __init__(self, at: int):
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("no memory is left")
        return func(*args, **(kwargs or {}))


REGIONS: dict[str, Any] = {
    "rerun": {"engine": "rerun"},
    "replay": {"engine": "replay"},
    "fingerprints": {"engine": "replay", "verify": "fingerprints"},
    "keep": {"engine": "replay", "keep": mb.policies.matmuls},
}


def thread_state() -> tuple[Any, ...]:
    return (
        _torch.top_saved_tensors_hooks(),
        _torch.dispatch_mode_count(),
        _torch.function_mode_count(),
        observer.observers(),
        _torch_observing.is_observing_excluded(),
        torch.is_grad_enabled(),
    )


def living_frames() -> int:
    gc.collect()
    return sum(type(o) is ReplayFrame for o in gc.get_objects())


@pytest.mark.parametrize("region", REGIONS)
def test_row_b11_a_failure_at_any_operator_leaves_the_thread_as_it_was(region: str):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout())
    x = torch.randn(3, 4, requires_grad=True)
    before = thread_state()
    outer = mb.checkpoint(engine="replay")
    failures = 0
    for at in range(0, 480, 3):
        try:
            with Failing(at):
                call = mb.checkpoint(**REGIONS[region])(model)
                y = outer(lambda x: call(x.sin()).exp())(x)  # noqa: B023
                y.sum().backward()
        except torch.OutOfMemoryError:
            failures += 1
        assert thread_state() == before
    assert 10 < failures < 160


@pytest.mark.parametrize("method", ["finish", "settle"])
def test_row_b11_a_failure_at_the_end_of_a_forward_takes_the_hooks_off(
    method: str, monkeypatch: pytest.MonkeyPatch
):
    from membudget.engine.replay import frame, recorder

    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    if method == "finish":
        monkeypatch.setattr(recorder.Recorder, "settle", fails)
    else:
        monkeypatch.setattr(frame, "settle_source", fails)
    before, frames = thread_state(), living_frames()
    x = torch.randn(3, 4, requires_grad=True)

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        mb.checkpoint(engine="replay")(lambda x: x.sin().exp())(x)

    assert thread_state() == before
    assert living_frames() <= frames


def test_row_b11_a_failure_in_a_span_takes_the_hooks_off(
    monkeypatch: pytest.MonkeyPatch,
):
    from membudget.engine.replay import recorder

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.h:
                x = block(x).tanh()
            return x

    model = Model()
    mb.apply(model, spans=[("h.0", "h.2")])

    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(recorder.Recorder, "settle", fails)
    before = thread_state()
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        model(torch.randn(2, 4))
    assert thread_state() == before
