"""One call of a replay region: what it names, what it warns of, what failures leave."""

from __future__ import annotations

import gc
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import policies
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region
from membudget.engine.replay.frame import ReplayFrame
from tests.accelerators import pretend
from tests.keeps import replay


def changed(match: str) -> Any:
    return pytest.raises(mb.ChangedSinceForwardError, match=match)


@pytest.mark.parametrize("verify", [False, True, "fingerprints"])
def test_an_argument_that_was_changed_since_is_named_by_its_place(verify):
    x = torch.ones(3, requires_grad=True)
    mask = torch.full((3,), 2.0)
    region = replay(verify=verify)(lambda x, y, mask: (x * mask).sin().exp())
    loss = region(x, 1.0, mask).sum()
    mask.add_(1)
    with changed("argument 1 was changed|argument 2 was changed"):
        loss.backward()


@pytest.mark.parametrize("key", ["weight", "scale"])
def test_what_the_function_reaches_is_named_by_its_path(key):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    scale = torch.ones(3)
    model[0].register_buffer("scale", scale)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.inner(x)
            return (h * scale).sin().exp()

    scaled = Scaled()
    loss = replay()(scaled)(torch.ones(2, 3, requires_grad=True)).sum()
    with torch.no_grad():
        getattr(model[0], key).add_(1)
    with changed(f"inner.0.{key}' was changed"):
        loss.backward()


@pytest.mark.parametrize("then", [torch.clone, torch.sin], ids=["saved", "read"])
def test_a_parameter_without_memory_is_refused_by_an_error_that_says_why(then):
    x = torch.ones(3, requires_grad=True)
    weight = nn.Parameter(torch.ones(3))
    loss = replay(verify=False)(lambda x: then(x * weight))(x).sum()
    weight.untyped_storage().resize_(0)  # As FSDP does after the forward.
    with pytest.raises(mb.CheckpointError, match="whose memory FSDP has freed"):
        loss.backward()


class Slotted:
    """A function to which nothing can refer weakly."""

    __slots__ = ("mask",)

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.mask).sin().exp()


def test_what_cannot_be_named_is_told_by_its_shape():
    mask = torch.ones(3)
    loss = replay()(Slotted(mask))(torch.ones(3, requires_grad=True)).sum()
    mask.add_(1)
    with changed(r"a tensor of shape \(3,\) was changed"):
        loss.backward()


def test_a_frame_keeps_no_function_alive():
    class Owner:
        def method(self, x: Tensor) -> Tensor:
            return x.sin().exp()

    owner = Owner()
    loss = replay()(owner.method)(torch.ones(3, requires_grad=True)).sum()
    del owner
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is Owner]
    loss.backward()


def test_a_policy_function_that_keeps_nothing_is_warned_of():
    from membudget.compat import create_selective_checkpoint_contexts

    def run(operators: list[Any]) -> None:
        x = torch.ones(3, requires_grad=True)
        contexts = create_selective_checkpoint_contexts(operators)
        y = mb.checkpoint(
            lambda x: x.sin().exp(), x, context_fn=lambda: contexts, verify=False
        )
        y.sum().backward()

    with pytest.warns(UserWarning, match="kept none of its 2 operators' outputs"):
        run([torch.ops.aten.mm])
    run([torch.ops.aten.sin])


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_forward_that_fails_leaves_neither_hooks_nor_observers(fails_at):
    def function(x: Tensor) -> Tensor:
        for step in range(1, 4):
            x = x.sin()
            if step == fails_at:
                raise KeyError("in the forward")
        return x

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(KeyError, match="in the forward"):
        replay()(function)(x)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = x.sin()
    assert len(saved) == 1
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, x.detach().cos())


class Fails(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises when an operator runs, as often as it is told."""

    def __init__(self, operator: Any, times: int) -> None:
        super().__init__()
        self.operator, self.times = operator, times

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is self.operator and self.times:
            self.times -= 1
            raise MemoryError("no room")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.sin().exp().cos(), "exp.default"),
        (lambda x: x.sin().exp().cos() + x.sinh().tanh().sin(), "exp.default"),
        (
            lambda x: (x.sin() * torch.zeros_like(x).bernoulli_(0.5)).exp().cos(),
            "bernoulli_.float",
        ),
    ],
    ids=["at the first request", "at the second", "while it draws"],
)
def test_a_replay_that_fails_can_be_tried_again(function, operator):
    x = torch.linspace(0, 1, 3, requires_grad=True)
    torch.manual_seed(0)
    y = replay()(function)(x)
    with Fails(attrgetter(operator)(torch.ops.aten), 1):
        with pytest.raises(MemoryError, match="no room"):
            torch.autograd.grad(y.sum(), x, retain_graph=True)
        (found,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(found, expected)


def test_the_output_of_an_operator_that_cannot_run_again_is_kept():
    x = torch.linspace(0, 1, 3, requires_grad=True)
    failing = Fails(torch.ops.aten.exp.default, 0)

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        failing.times = 1  # The replay that verifies comes next.
        return y

    with (
        failing,
        pytest.warns(mb.UnrepeatableWarning, match="aten.exp.default, did not"),
    ):
        y = replay(verify=True)(function)(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(x.sin().exp().cos().sum(), x)
    assert torch.equal(found, expected)


def test_regions_and_recomputes_are_counted():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    applied = mb.apply(model, names=["0", "1"], engine="replay")
    x = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    with torch.no_grad():
        model(x)
    found = applied.status().regions
    assert [(r.forwards, r.recomputes) for r in found] == [(2, 2), (2, 2)]


def test_a_backward_that_asks_for_several_chains_counts_one_recompute():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.sin().exp(), x.cos().exp(), x.tanh().exp()

    statistics = Statistics("block")
    options = RegionOptions(engine="replay", verify=False)
    x = torch.linspace(0, 1, 3, requires_grad=True)
    outputs = run_region(function, (x,), {}, options, statistics)
    for count in (1, 2):
        torch.autograd.grad(sum(outputs).sum(), x, retain_graph=True)
        assert statistics.recomputes == count


@pytest.mark.parametrize("keep", [policies.nothing, policies.everything])
def test_outer_hooks_see_what_the_region_holds(keep):
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    x = torch.linspace(0, 1, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        y = replay(keep)(lambda x: (x * 2).sin().exp())(x)
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    assert torch.equal(found, expected)
    assert packed


def test_a_replay_runs_on_the_stream_of_its_forward(monkeypatch):
    device = pretend(monkeypatch)
    device.streams[0] = device.stream("forward")
    x = torch.ones(3, requires_grad=True)
    y = replay()(lambda x: x.sin().exp())(x)
    device.streams[0] = device.stream("backward")
    assert device.asked == []
    y.sum().backward()
    assert device.asked[:2] == ["forward waits for backward", "on forward"]
    waits = "backward waits for forward"
    assert device.asked[-3:] == [waits, "on backward", waits]
    assert device.streams[0].name == "backward"


def test_a_list_that_contains_itself_is_refused_as_an_argument():
    x = torch.ones(3, requires_grad=True)
    box: list[Any] = [x]
    box.append(box)
    with pytest.raises(RecursionError, match="maximum recursion depth exceeded"):
        replay()(lambda x, box: x.sin().exp())(x, box)


def test_a_frame_knows_whether_something_lies_on_top_of_it():
    def same(tensor: Tensor) -> Tensor:
        return tensor

    x = torch.ones(3, requires_grad=True)
    options = RegionOptions(engine="replay", verify=False)
    outer, inner = (ReplayFrame(torch.sin, (x,), {}, options, None) for _ in range(2))
    outer.begin()
    assert outer.is_on_top()
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert not outer.is_on_top()
    inner.begin()
    assert inner.is_on_top()
    assert not outer.is_on_top()
    inner.abandon()
    assert outer.is_on_top()
    outer.abandon()
    assert not outer.is_on_top()
