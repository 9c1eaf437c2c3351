"""Observers see the operators of a step, and change none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from membudget._torch import DispatchMode, without_dispatch_modes
from membudget._torch_observing import inherited_by_autograd
from membudget.observer import Observer, observers


class Names(Observer):
    """Notes the names of the operators that it sees."""

    def __init__(self, sees_subclasses: bool = False) -> None:
        self.names: list[str] = []
        self.sees_subclasses = sees_subclasses

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.names.append(str(operator).removeprefix("aten.").split(".")[0])
        return operator(*args, **kwargs)


class Mode(DispatchMode):
    """Notes the names of the operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A tensor subclass that computes with another tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func, types, args=(), kwargs=None
    ):
        args = [a.held if isinstance(a, Wrapped) else a for a in args]
        return Wrapped(func(*args, **(kwargs or {})))


def energy_gradient(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(x.sin().prod(), x)
    return gradient


@pytest.mark.parametrize("sees_subclasses", [False, True])
def test_operators_are_seen_below_autograd(sees_subclasses: bool):
    x = torch.ones(3, requires_grad=True)
    with Names(sees_subclasses) as seen:
        y = torch.nn.functional.linear(x, torch.ones(2, 3)).sin()
    assert y.requires_grad
    assert seen.names[-1] == "sin"
    assert "linear" not in seen.names


def test_rule1_several_observers_see_one_call_innermost_first():
    order = []

    class Marks(Observer):
        def __init__(self, mark: str):
            self.mark = mark

        def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            order.append(self.mark)
            output = operator(*args, **kwargs)
            order.append(self.mark)
            return output

    with Marks("outer") as outer, Marks("inner") as inner:
        assert observers() == (outer, inner)
        torch.ones(2).sin()
    assert order[-4:] == ["inner", "outer", "outer", "inner"]
    assert observers() == ()


def test_rule1_what_a_kernel_calls_is_not_seen():
    with Names() as seen:
        torch.zeros(2, 2)
    assert seen.names == ["zeros"]


def test_formulas_are_those_without_an_observer():
    x = torch.linspace(0.1, 0.9, 5).requires_grad_()
    with Mode() as before:
        pass
    plain = energy_gradient(x)
    with Names() as seen:
        found = energy_gradient(x)
    with Names(sees_subclasses=True) as on_modes:
        energy_gradient(x)
    assert not before.names
    assert torch.equal(found, plain)
    assert "nonzero" in seen.names
    assert "nonzero" not in on_modes.names  # That is what a mode would have changed.


def backward_in_two_threads(function: Callable[[Tensor], Tensor]) -> int:
    """Call a function in backward passes of two threads; return how often."""
    deep: list[int] = []

    class Deeper(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            deep.append(threading.get_ident())
            # After some 60 backwards inside of each other autograd takes a thread.
            if len(deep) < 70:
                with torch.enable_grad():
                    y = Deeper.apply(torch.ones(2, requires_grad=True))
                    torch.autograd.backward(y.sum())
            return function(gradient)

    Deeper.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert len(set(deep)) > 1
    return len(deep)


def test_rule2_a_thread_of_autograd_s_sees_the_same_observers():
    with Names() as seen:
        count = backward_in_two_threads(torch.tan)
    assert seen.names.count("tan") == count
    with Names():
        assert len(observers()) == 1


def test_rule2_a_thread_of_autograd_s_adds_its_own_observers_to_them():
    added: list[str] = []

    def function(gradient: Tensor) -> Tensor:
        with Names() as own:
            gradient = gradient.tan()
            with Names() as inner:
                gradient = gradient.sin()
        added.extend(own.names + inner.names)
        return gradient.exp()

    with Names() as seen:
        count = backward_in_two_threads(function)
    assert added == ["tan", "sin", "sin"] * count
    for name in ("tan", "sin", "exp"):
        assert seen.names.count(name) == count


def test_another_thread_is_not_observed():
    with Names() as seen:
        thread = threading.Thread(target=lambda: torch.ones(2).tan())
        thread.start()
        thread.join()
    assert "tan" not in seen.names


def test_a_thread_ends_without_observers_that_it_shares():
    found = []

    def observe() -> None:
        for _ in range(2):
            with Names() as seen:
                torch.ones(2).tan()
            found.extend([seen.names.count("tan"), inherited_by_autograd()])

    thread = threading.Thread(target=observe)
    thread.start()
    thread.join()
    assert found == [1, None, 1, None]


def test_rule3_higher_order_operators_are_observed():
    from torch._higher_order_ops.cond import cond_op

    x = torch.ones(2)
    with Names() as seen:
        (y,) = cond_op(True, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))
    assert torch.equal(y, x.sin())
    assert seen.names[0] == "cond"


def test_rule4_what_becomes_a_subclass_is_no_python_object_yet():
    class Tagged(Tensor):
        pass

    with Names() as seen:
        parameter = torch.nn.Parameter(torch.ones(2) * 2)
        tagged = (torch.ones(2) * 3).as_subclass(Tagged)
    assert type(parameter) is torch.nn.Parameter
    assert type(tagged) is Tagged
    assert not {"detach", "alias"} & set(seen.names)


def test_rule5_what_a_fake_mode_computes_shapes_with_is_not_seen():
    with Names() as seen, FakeTensorMode():
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert "mm" not in seen.names


def test_a_mode_that_is_on_already_stands_outside_of_an_observer():
    with Mode() as mode, Names() as seen:
        torch.ones(2).sin()
    assert seen.names == mode.names == ["ones", "sin"]


def test_a_mode_that_comes_later_is_seen_from_below():
    class Doubles(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {})) * 2

    with Names() as seen:
        assert seen.is_innermost()
        with Doubles():
            assert not seen.is_innermost()
            torch.sin(torch.zeros(()))
    assert seen.names[-2:] == ["sin", "mul"]


@pytest.mark.parametrize("sees_subclasses", [False, True])
def test_an_observer_among_modes_sees_the_operators_of_subclasses(
    sees_subclasses: bool,
):
    inner = torch.ones(2)
    kinds: list[type] = []

    class Kinds(Observer):
        def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            kinds.extend(type(a) for a in args if isinstance(a, Tensor))
            return operator(*args, **kwargs)

    observer = Kinds()
    observer.sees_subclasses = sees_subclasses
    x = Wrapped(inner)
    with observer:
        torch.sin(x)
    assert (Wrapped in kinds) == sees_subclasses


def test_an_exception_of_an_operator_passes_and_leaves_the_observer():
    with Names() as seen:
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.ones(2) + torch.ones(3)
        torch.ones(2).sin()
    assert seen.names[-1] == "sin"
    torch.ones(2).cos()
    assert seen.names[-1] == "sin"


def test_nothing_is_seen_while_modes_are_switched_off():
    with Names() as seen:
        with without_dispatch_modes():
            torch.ones(2).tan()
        torch.ones(2).sin()
    assert "tan" not in seen.names
    assert seen.names[-1] == "sin"
