"""A call's frame is made in C++ as Python makes it, and runs as Python runs it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget import offload, policies
from membudget._torch import top_saved_tensors_hooks
from membudget.engine import native
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.replay import accelerated, verified
from membudget.engine.replay.extension import EXTENSION
from membudget.engine.replay.frame import ReplayFrame
from membudget.engine.replay.routes import Routes
from membudget.engine.stages import Stages
from membudget.observer import Observer, observers
from membudget.policies import Planned
from tests.devices import is_cpu


@pytest.fixture(autouse=True)
def extension() -> None:
    """Skip these tests where there is no extension, or a device that Python asks.

    `serve` lasts for the process: where Python is tested, it would end that.
    """
    if not (is_cpu() and native.is_wanted() and accelerated.serve()):
        pytest.skip("the extension has not been built, or serves a device")


def _run(_: Any, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return operator(*args, **kwargs)


Subclass: Any = type(
    "Subclass", (torch.Tensor,), {"__torch_dispatch__": classmethod(_run)}
)
"""A tensor whose operators only a mode sees."""


class Layer(nn.Linear):
    """A module, whose forward is a method."""

    def scaled(self, x: Tensor, by: float = 2.0) -> Tensor:
        return self(x) * by


LAYER = Layer(3, 3)
X = torch.ones(3, 3, requires_grad=True)
SPARSE = torch.eye(2).to_sparse() if is_cpu() else X
STAGES = Stages([(0, 0), (2, 0)], [(), ()])
PLANNED = Planned({(1, 0): "aten.mm.default"}, STAGES, "", 2, ["aten.mm.default"])


def closed_over(*values: Any) -> Callable[..., Any]:
    return lambda x, **_: x * len(values)


def with_empty_cell() -> Callable[..., Any]:
    def function(x: Any, **_: Any) -> Any:
        return later

    if not LAYER:
        later = 1
    return function


FUNCTIONS = {
    "a module": LAYER,
    "a method of a module": LAYER.scaled,
    "a function": closed_over(),
    "a closure": closed_over(LAYER, 2, "two", None, X, [X, (1.5,)], {"a": LAYER}),
    "an empty cell": with_empty_cell(),
    "a partial": functools.partial(LAYER.scaled, by=3.0),
    "a builtin": torch.sin,
}
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one": ((X,), {}),
    "more": ((X, 1, True, None, 2.5, "word", torch.float32, X.device), {"y": X}),
    "nested": (([X, (X.detach(), {"a": X}, [[[[X]]]])],), {"mask": None, "rest": {}}),
    "special": ((SPARSE, X, X), {"w": nn.Parameter(X)}),
    "a subclass": ((torch.ones(2).as_subclass(Subclass),), {}),
}
OPTIONS = {
    "plain": {},
    "a share": {"verify": 0.01},
    "fingerprints": {"verify": "fingerprints"},
    "always": {"verify": "always"},
    "unverified": {"verify": False, "strict": True},
    "planned": {"keep": PLANNED, "verify": 0.01},
    "matmuls": {"keep": policies.matmuls | policies.inside("*.attn")},
    "offloaded": {"keep": policies.offloaded(policies.matmuls, offload("1MiB"))},
    "inputs offloaded": {"offload": offload("1MiB")},
}


def frame_of(name: str, call: str, options: RegionOptions, make: Any) -> ReplayFrame:
    args, kwargs = ARGUMENTS[call]
    frame: ReplayFrame = make(FUNCTIONS[name], args, kwargs, options, Statistics("l"))
    return frame


def content(value: Any, depth: int = 0) -> Any:
    """Return what an object holds, in a form that can be compared."""
    kind = type(value)
    names = [n for c in kind.__mro__ for n in getattr(c, "__slots__", ())]
    names = [n for n in names if n != "__weakref__" and hasattr(value, n)]
    if depth > 4 or not kind.__module__.startswith("membudget.engine"):
        is_plain = kind in (int, bool, str, dict, tuple, type(None), set)
        return kind, value if is_plain else None
    names += ["sees_subclasses"] if hasattr(value, "sees_subclasses") else []
    return kind, {n: content(getattr(value, n), depth + 1) for n in names}


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("call", ARGUMENTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_frame_made_in_cpp_is_the_one_that_python_makes(name, call, settings):
    options = RegionOptions(engine="replay", **settings)
    in_cpp = EXTENSION[0].replay_frame
    verified.VERIFIED.clear()
    first = content(frame_of(name, call, options, ReplayFrame))
    known = list(verified.VERIFIED.values())

    def frames() -> list[Any]:
        made = []
        for make in (ReplayFrame, in_cpp):
            for found in known:
                found.calls, found.sampling = 4, None
            made.append(content(frame_of(name, call, options, make)))
        return made

    unverified = frames()
    for found in known:
        found.paths = [("path",)]
    followed = frames()
    assert unverified[0] == unverified[1]
    assert followed[0] == followed[1]
    # They are known under the signature of the first, and verified no more.
    assert list(verified.VERIFIED.values()) == known
    assert (first != followed[0]) == bool(known)


def test_calls_are_counted_and_sampled_alike(monkeypatch):
    options = RegionOptions(engine="replay", verify=0.25)
    seen = []
    for make in (ReplayFrame, EXTENSION[0].replay_frame):
        verified.VERIFIED.clear()
        due = []
        for number in range(1, 40):
            x = torch.ones(1 + number % 5)
            make(torch.sin, (x,), {}, options, None)
            (found,) = verified.VERIFIED.values()
            sampling = found.sampling
            assert sampling is not None
            due.append((found.calls, found.is_sampled, sampling.is_due))
        seen.append(due)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 30


class Counter(Observer):
    """Counts operators."""

    count = 0

    def observe(self, operator: Any, args: Any, kwargs: Any) -> Any:
        self.count += 1
        return operator(*args, **kwargs)


def test_the_thread_is_as_it_was_after_a_call_and_after_a_call_that_raises():
    options = RegionOptions(engine="replay", verify=False)

    def fails(x: Tensor) -> Tensor:
        assert len(observers()) == 1
        raise ValueError("it fails")

    def runs(x: Tensor) -> Tensor:
        assert len(observers()) == 1
        return x.sin().exp()

    for _ in range(4):
        with pytest.raises(ValueError, match="it fails"):
            accelerated.replay_frame(fails, (X,), {}, options, None).run((X,), {})
        assert observers() == ()
        y = accelerated.replay_frame(runs, (X,), {}, options, None).run((X,), {})
        assert observers() == ()
        (gradient,) = torch.autograd.grad(y.sum(), X)
        assert torch.equal(gradient, torch.autograd.grad(runs_plainly().sum(), X)[0])


def runs_plainly() -> Tensor:
    return X.sin().exp()


def test_an_observer_around_a_call_sees_its_operators_and_no_others():
    options = RegionOptions(engine="replay", verify=False)
    counts = []
    for _ in range(5):
        with Counter() as counter:
            frame = accelerated.replay_frame(LAYER.scaled, (X,), {}, options, None)
            frame.run((X,), {})
        counts.append(counter.count)
        X.sin()
        assert counter.count == counts[0] == 3


def test_an_observer_that_is_left_open_inside_stays():
    options = RegionOptions(engine="replay", verify=False)
    left: list[Counter] = []

    def opens(x: Tensor) -> Tensor:
        left.append(Counter().__enter__())
        return x.sin()

    accelerated.replay_frame(opens, (X,), {}, options, None).run((X,), {})
    assert observers() == (left[0],)
    X.sin()
    assert left[0].count >= 1
    left[0].__exit__(None, None, None)
    assert observers() == ()


def test_a_frame_goes_with_its_graph():
    options = RegionOptions(engine="replay", verify=False)
    for _ in range(5):
        frame = accelerated.replay_frame(LAYER.scaled, (X,), {}, options, None)
        y = frame.run((X,), {})
        y.sum().backward()
    del frame, y
    gc.collect()
    assert not [f for f in gc.get_objects() if type(f) is ReplayFrame]


def test_nothing_stays_on_the_thread_if_a_call_cannot_set_out(monkeypatch):
    def fails(_: Routes) -> None:
        raise MemoryError("no room for a survey")

    monkeypatch.setattr(Routes, "survey", fails)
    options = RegionOptions(engine="replay", verify=False)
    frame = accelerated.replay_frame(lambda x: x.cos(), (X,), {}, options, None)
    with pytest.raises(MemoryError, match="no room for a survey"):
        frame.run((X,), {})
    assert observers() == ()
    assert top_saved_tensors_hooks() is None
