"""What surrounds a call is there again in its recompute, and gone after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from membudget import _torch_settings
from membudget.engine.surroundings import Ambient
from membudget.scope import Scope
from membudget.state.autocast import Autocast, enter_autocast
from tests.settings import EXPRESSIONS, change, kept


def as_kernels_see(settings: tuple[Any, ...]) -> list[Any]:
    """Return settings without the two names of one precision."""
    return ["ieee" if value == "none" else value for value in settings]


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_rerun_sees_each_setting_of_its_forward(name: str, fails: bool) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(as_kernels_see(_torch_settings.read()))
        if fails and len(seen) > 1:
            raise ValueError("not a second time")
        return x.sin().exp()

    with kept():
        x = torch.ones(3, requires_grad=True)
        y = mb.checkpoint(function, x)
        change(name)
        changed = _torch_settings.read()
        if fails:
            with pytest.raises(ValueError, match="not a second time"):
                y.sum().backward()
        else:
            y.sum().backward()
        assert _torch_settings.read() == changed
    assert seen[0] == seen[1]


class Asking(TorchDispatchMode):
    """Notes the settings under which each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.fails = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.sin.default:
            self.seen.append(as_kernels_see(_torch_settings.read()))
            if self.fails:
                raise ValueError("not a second time")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_replay_sees_each_setting_of_its_forward(name: str, fails: bool) -> None:
    with kept(), Asking() as asking:
        x = torch.ones(3, dtype=torch.float32, requires_grad=True)
        y = mb.checkpoint(lambda x: x.sin().exp(), x, engine="replay", verify=False)
        loss = y.sum()
        change(name)
        changed = _torch_settings.read()
        asking.fails = fails
        if fails:
            with pytest.raises(ValueError, match="not a second time"):
                loss.backward()
        else:
            loss.backward()
        assert _torch_settings.read() == changed
    assert len(asking.seen) == 2
    assert asking.seen[0] == asking.seen[1]


class Outer(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **kwargs or {})


def function_modes() -> list[Any]:
    """Return the function modes that are on."""
    from membudget._torch import function_modes

    return list(function_modes())


def test_function_modes_of_the_forward_are_entered_once_and_left() -> None:
    with Outer() as outer:
        ambient = Ambient()
        with Scope() as scope:
            ambient.enter(scope)
            assert function_modes() == [outer]
    with Scope() as scope:
        ambient.enter(scope)
        assert function_modes() == [outer]
    assert function_modes() == []


def test_a_default_device_of_the_backward_is_covered() -> None:
    ambient = Ambient()
    with torch.device("meta"), Scope() as scope:
        ambient.enter(scope)
        assert torch.empty(1).device.type == "cpu"


def test_operators_alone_get_dispatch_modes_but_no_function_modes() -> None:
    with Outer(), Asking() as asking:
        ambient = Ambient()
    with Scope() as scope:
        ambient.enter_for_operators(scope)
        assert function_modes() == []
        torch.ones(2).sin()
    torch.ones(2).sin()
    assert len(asking.seen) == 1


def test_a_dispatch_mode_of_the_backward_stays_on() -> None:
    ambient = Ambient()
    with Asking() as asking, Scope() as scope:
        ambient.enter(scope)
        torch.ones(2).sin()
    assert len(asking.seen) == 1


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_entered_as_it_was_read(cache: bool) -> None:
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=cache):
        state = Autocast()
    with Scope() as scope:
        enter_autocast(state, scope)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_cache_enabled() is cache
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_that_was_off_is_off_again() -> None:
    with torch.autocast("cpu"), Scope() as scope:
        enter_autocast(None, scope)
        assert not torch.is_autocast_enabled("cpu")
