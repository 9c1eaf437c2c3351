"""The hooks of rerun regions in Python and in C++: the same notes, the same errors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine import calls, native, rerun, rerun_extension, rerun_frame
from membudget.engine.recording import Recording
from membudget.engine.rerun_frame import RerunFrame


@pytest.fixture(params=["Python", "C++"])
def hooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(rerun, "RERUN", [])
        monkeypatch.setattr(rerun_frame, "RERUN", [])
        for module in (calls, rerun_extension):
            monkeypatch.setattr(module, "RERUN", [])
        monkeypatch.setattr(native, "built_extension", lambda: None)
    elif native.built_extension() is None:
        pytest.skip("the extension has not been built")
    return str(request.param)


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


def chain(x: Tensor) -> Tensor:
    """Saves tensors of several shapes, strides and dtypes."""
    y = x.sin().t().exp() @ x.double().cos().float()
    return y.tanh() * y.sigmoid()


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    calls = []
    method = getattr(owner, name)

    def counting(*args: Any) -> Any:
        calls.append(1)
        return method(*args)

    monkeypatch.setattr(owner, name, counting)
    return calls


def test_python_packs_what_c_plus_plus_does_not(hooks, monkeypatch):
    chain(leaf()).sum().backward()
    mb.checkpoint(chain, leaf(), engine="rerun", verify=False).sum().backward()
    packs = counted(monkeypatch, Recording, "pack")
    unpacks = counted(monkeypatch, RerunFrame, "_unpack")
    fills = counted(monkeypatch, rerun.Rerun, "_pack")
    x = leaf()
    mb.checkpoint(chain, x, engine="rerun", verify=False).sum().backward()
    saved = len(list_of_saved(chain))
    expected = (saved, saved, saved) if hooks == "Python" else (0, 0, 0)
    assert (len(packs), len(unpacks), len(fills)) == expected


def list_of_saved(function: Any) -> list[Tensor]:
    saved: list[Tensor] = []
    keep = saved.append
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda _: torch.ones(())):
        function(leaf())
    return saved


def test_the_notes_are_those_of_python(hooks, monkeypatch):
    frames: list[RerunFrame] = []
    run = RerunFrame.run

    def noting(frame: RerunFrame, args: Any, kwargs: Any) -> Any:
        frames.append(frame)
        return run(frame, args, kwargs)

    monkeypatch.setattr(RerunFrame, "run", noting)
    for _ in range(3):  # The second call expects what the first has noted.
        mb.checkpoint(chain, leaf(), engine="rerun").sum().backward()
    expected = [(t.shape, t.dtype, t.device, t.stride()) for t in list_of_saved(chain)]
    for frame in frames:
        assert frame.metadata == expected
        assert [type(shape) for shape, *_ in frame.metadata] == [torch.Size] * 9
    assert len(expected) == 9


@pytest.mark.parametrize("guards", [True, False])
def test_tensors_are_dropped_and_given_once(hooks, guards):
    x = leaf()
    plain = torch.autograd.grad(chain(x).sum(), x)[0]
    y = mb.checkpoint(chain, x, engine="rerun", guards=guards, verify=False)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(gradient, plain)


def test_what_autograd_was_given_is_not_kept(hooks):
    given: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        given.append(weakref.ref(y))
        return (y.exp() * y).cos()

    x = leaf()
    mb.checkpoint(function, x, engine="rerun", verify=False).sum().backward()
    assert [reference() for reference in given] == [None, None]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda x: x.double().sin().float().cos(), "float64"),
        (lambda x: x[:1].sin().cos(), r"float32\[1, 3\]"),
        (lambda x: x.t().sin().t().cos(), r"stride \(1, 3\)"),
    ],
)
def test_another_tensor_than_the_forwards_is_named(hooks, other, text):
    runs: list[int] = []

    def function(x: Tensor) -> Any:
        runs.append(1)
        return (x.sin().cos() if len(runs) == 1 else other(x)).exp()

    y = mb.checkpoint(function, leaf(), engine="rerun", verify=False)
    with pytest.raises(mb.RecomputeMismatchError, match=text):
        y.sum().backward()


@pytest.mark.parametrize("exchange", [False, True])
def test_a_tensor_written_between_recompute_and_unpack_is_refused(hooks, exchange):
    made: list[Tensor] = []

    def write(gradient: Tensor) -> None:
        if exchange:
            made[-1].data = torch.ones(2, 3)
        else:
            made[-1].add_(1)

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        made.append(y.detach() if not exchange else y)
        z = y.cos().exp()
        if len(made) == 1:  # It runs after `z` was unpacked, and before `y` is.
            z.register_hook(write)
        return z.tanh()

    loss = mb.checkpoint(function, leaf(), engine="rerun", verify=False).sum()
    with pytest.raises(mb.CheckpointError, match=r"saved tensor of shape \(2, 3\)"):
        loss.backward()


def test_buffers_that_a_recompute_restores_may_change_afterwards(hooks):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    twin = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    twin.load_state_dict(model.state_dict())
    x = leaf()
    for _ in range(2):
        model(x).sum().backward()
        mb.checkpoint(twin, x, engine="rerun", verify=False).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "odd",
    [
        lambda x: x.to_sparse().to_dense(),
        lambda x: torch.complex(x, x).conj().real,
        lambda x: torch.sparse.mm(torch.eye(2).to_sparse(), x),
        lambda x: torch.view_as_real(torch.complex(x, x).conj().resolve_conj()),
    ],
)
def test_unusual_tensors_are_left_to_python(hooks, odd):
    def function(x: Tensor) -> Tensor:
        made: Tensor = odd(x.sin()).cos().exp()
        return made

    x = leaf()
    plain = torch.autograd.grad(function(x).sum(), x)[0]
    y = mb.checkpoint(function, x, engine="rerun", verify=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)
