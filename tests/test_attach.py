"""A region on a module: the class changes, and nothing else that anyone sees."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget.attach import (
    carried_by,
    check_can_carry,
    has_region,
    put,
    put_region,
    remove_region,
    statistics_of,
)
from membudget.engine.options import RegionOptions, Statistics
from membudget.errors import SelectionError

X = torch.ones(2, 3)


class Mine(nn.Linear):
    """A layer of the user's."""

    def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
        """Scale what the layer makes."""
        return super().forward(input).tanh() * scale


class Noting:
    """Runs a module's forward, and notes what it was called with."""

    statistics = None

    kept = ""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return function(*args, **kwargs)


def test_a_class_is_freed_with_its_last_module():
    def carried() -> weakref.ref[Any]:
        class Local(nn.Linear):
            """A class of one function."""

        module = Local(3, 3)
        put_region(module, RegionOptions())
        remove_region(module)
        return weakref.ref(Local)

    reference = carried()
    gc.collect()  # The generated class,
    gc.collect()  # then that of which it was made.
    assert reference() is None


def test_the_class_of_a_module_with_a_region_reads_as_its_own():
    plain, module = Mine(3, 3), Mine(3, 3)
    put_region(module, RegionOptions())
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(module), name) == getattr(Mine, name)
    assert type(module) is not Mine
    assert isinstance(module, Mine)
    assert repr(module) == repr(plain)
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert module.forward.__doc__ == plain.forward.__doc__


def test_modules_of_one_class_share_the_class_that_carries_regions():
    one, other = Mine(3, 3), Mine(3, 3)
    for module in (one, other):
        put_region(module, RegionOptions())
    assert type(one) is type(other)
    before = type(one)
    put_region(one, RegionOptions())
    assert type(one) is before
    remove_region(one)
    assert (type(one), type(other)) == (Mine, before)


def test_a_region_runs_the_forward_that_a_module_had():
    module, noting = Mine(3, 3), Noting()
    expected = module(X, scale=2.0)
    put(module, noting, "m")
    assert torch.equal(module(X, scale=2.0), expected)
    ((args, kwargs),) = noting.calls
    assert (len(args), kwargs) == (1, {"scale": 2.0})
    assert carried_by(module) is noting
    assert has_region(module)
    assert statistics_of(module) is None


def test_the_counters_of_a_region_bear_its_name():
    module = Mine(3, 3)
    assert statistics_of(module) is None
    statistics = put_region(module, RegionOptions(), "h.0")
    assert isinstance(statistics, Statistics)
    assert (statistics.label, statistics_of(module)) == ("h.0", statistics)
    assert put_region(module, RegionOptions()).label == ""
    module(X.clone().requires_grad_())
    again = statistics_of(module)
    assert again is not None
    assert (statistics.forwards, again.forwards) == (0, 1)


def test_a_forward_that_was_set_on_the_instance_runs_and_is_put_back():
    module, noting = Mine(3, 3), Noting()

    def forward(x: Tensor) -> Tensor:
        return x + 1

    module.forward = forward  # type: ignore[assignment]
    put(module, noting, "")
    assert "forward" not in vars(module)
    assert torch.equal(module(X), X + 1)
    assert len(noting.calls) == 1
    remove_region(module)
    assert vars(module)["forward"] is forward
    assert type(module) is Mine

    # Unless another one was set in the meantime.
    put(module, noting, "")
    module.forward = torch.sin  # type: ignore[assignment]
    remove_region(module)
    assert vars(module)["forward"] is torch.sin
    assert not [name for name in vars(module) if "membudget" in name]


def test_removing_a_region_twice_or_from_a_plain_module_changes_nothing():
    module = Mine(3, 3)
    before = dict(vars(module))
    remove_region(module)
    put_region(module, RegionOptions())
    remove_region(module)
    remove_region(module)
    assert type(module) is Mine
    assert vars(module) == before
    assert not has_region(module)
    assert carried_by(module) is None


def test_a_class_that_was_made_of_ours_stays_and_runs_the_plain_forward():
    module, noting = Mine(3, 3), Noting()
    put(module, noting, "")
    ours = type(module)
    module.__class__ = type("Sharded", (ours,), {})
    remove_region(module)
    assert isinstance(module, ours)
    assert torch.equal(module(X), Mine.forward(module, X))
    assert noting.calls == []


class Reduced(Mine):
    """A module that says how it is pickled."""

    def __reduce__(self) -> Any:
        return _made_again, (type(self), dict(vars(self)))


def _made_again(kind: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    made = kind.__new__(kind)
    vars(made).update(state)
    return made


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, None])
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_copy_has_the_class_and_the_forward_that_the_module_had(copied, protocol):
    module = Mine(3, 3)
    module.forward = torch.sin  # type: ignore[assignment]
    put_region(module, RegionOptions())
    if copied is None:
        made = pickle.loads(pickle.dumps(module, protocol))
    else:
        made = copied(module)
    assert type(made) is Mine
    assert not [name for name in vars(made) if "membudget" in name]
    assert vars(made)["forward"] is torch.sin
    assert torch.equal(made.weight, module.weight)
    assert has_region(module)


def test_a_module_that_says_how_it_is_pickled_is_asked():
    module = Reduced(3, 3)
    put_region(module, RegionOptions())
    made = pickle.loads(pickle.dumps(module))
    assert type(made) is Reduced
    assert torch.equal(made.weight, module.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_whose_forward_cannot_be_replaced_is_refused():
    scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(SelectionError, match="'s' cannot carry a region: it is a Tor"):
        put_region(scripted, RegionOptions(), "s")
    lazy = nn.LazyLinear(3)
    with pytest.raises(SelectionError, match="'l' cannot carry a region: it is a laz"):
        put(lazy, Noting(), "l")
    assert type(lazy) is nn.LazyLinear
    lazy(X)
    check_can_carry("l", lazy)
    check_can_carry("m", Mine(3, 3))
