"""Make random numbers, by which models choose what they run, as large as can be.

Models skip layers at random, `if torch.rand(()) < drop`, so that each step takes other
bytes. A plan has to hold for the step that takes most, which chance seldom shows. So
single numbers, and a few that are drawn at once, are made the largest or the smallest
that can be drawn: one of the two skips no layer, whichever way a model compares. The
generator goes on as if they had been drawn.

Numbers of torch are set below all that records operators, so that `rand` stays one
operator, and a replay of it draws the same. Those of Python and NumPy are set where
their modules are asked for them, as `random.uniform(0, 1)` does.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from membudget._torch_drawing import below, cover
from membudget._torch_observing import (
    ITEM,
    inherited_by_autograd,
    share_with_autograd,
)
from membudget.errors import OptionError

Draws = Literal["largest", "smallest"]

LARGEST: Draws = "largest"
SMALLEST: Draws = "smallest"

MOST_NUMBERS = 128
"""Numbers that are drawn at once, one for each layer; more are data, such as noise."""

_PARTS = {LARGEST: 1 - 2**-8, SMALLEST: 2**-24}  # In (0, 1) in every common dtype.


def as_draws(name: str) -> Draws:
    """Return the draws of a name that a file holds.

    Raises:
        OptionError: If there are no such draws.
    """
    for draws in (LARGEST, SMALLEST):
        if draws == name:
            return draws
    raise OptionError(f"draws are 'largest' or 'smallest'; got {name!r}")


@dataclass
class Drawing:
    """What is drawn in a context.

    Attributes:
        draws: What the numbers are; `None` leaves them as they are drawn.
        has_drawn: Whether one or a few were drawn.
        may_decide: Whether one was drawn in Python, or a tensor's value was read after
            torch had drawn one.
    """

    draws: Draws | None
    has_drawn: bool = False
    may_decide: bool = False

    def number(self, low: float, high: float) -> float | None:
        """Return what a number between two others is; `None` if it is as drawn."""
        self.has_drawn = True
        return None if self.draws is None else low + (high - low) * _PARTS[self.draws]


_SHARED = "membudget.drawing"  # Also with the threads that run the backward pass.


@contextmanager
def drawing(draws: Draws | None) -> Iterator[Drawing]:
    """Set the random numbers that this thread draws, one or a few at once.

    Yields:
        What is drawn; without `draws`, the numbers are only noted.

    Example:
        >>> import torch
        >>> with drawing("largest"):
        ...     torch.rand(())
        tensor(0.9961)
    """
    outer, inner = inherited_by_autograd(_SHARED), Drawing(draws)
    with _covered():
        share_with_autograd(inner, _SHARED)
        try:
            yield inner
        finally:
            share_with_autograd(outer, _SHARED)
            if outer is not None:
                outer.has_drawn |= inner.has_drawn
                outer.may_decide |= inner.may_decide


class _Covered:
    """What covers the functions that draw, in all threads while one is in a context."""

    lock = Lock()
    contexts = 0
    undo = ExitStack()


@contextmanager
def _covered() -> Iterator[None]:
    with _Covered.lock:
        if not _Covered.contexts:
            _cover_all(_Covered.undo)
        _Covered.contexts += 1
    try:
        yield
    finally:
        with _Covered.lock:
            _Covered.contexts -= 1
            if not _Covered.contexts:
                _Covered.undo.close()


def _cover_all(undo: ExitStack) -> None:
    kernels = {"uniform_": _uniform, "_local_scalar_dense": _item}
    undo.callback(cover(kernels))
    for module, names in _in_python():
        for name in names.split():
            function = getattr(module, name)
            setattr(module, name, _in_range(function))
            undo.callback(setattr, module, name, function)


# Numbers of torch.


def _uniform(
    keys: Any, tensor: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any
) -> Any:
    uniform = torch.ops.aten.uniform_.default
    drawn = below(uniform, keys, tensor, low, high, **kwargs)
    current = inherited_by_autograd(_SHARED)
    is_few = 0 < tensor.numel() <= MOST_NUMBERS and not tensor.is_meta
    number = current.number(low, high) if current is not None and is_few else None
    if number is not None:
        below(torch.ops.aten.fill_.Scalar, keys, tensor, number)
    return drawn


def _item(keys: Any, tensor: Tensor) -> Any:
    current = inherited_by_autograd(_SHARED)
    if current is not None and current.has_drawn:
        current.may_decide = True
    return below(ITEM, keys, tensor)


# Numbers of Python and of NumPy.


def _in_python() -> Iterator[tuple[Any, str]]:
    """Yield the modules that draw, and the names of their functions that do."""
    yield random, "random uniform"
    if "numpy" in sys.modules:
        yield sys.modules["numpy"].random, "rand random random_sample uniform"


def _in_range(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that draws between 0 and 1, or between its first arguments."""
    has_limits = function.__name__ == "uniform"

    @wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        low, high = _limits(*args, **kwargs) if has_limits else (0.0, 1.0)
        # Arrays of limits are of NumPy: so many are data.
        is_few = getattr(found, "size", 1) <= MOST_NUMBERS
        current = inherited_by_autograd(_SHARED)
        if current is None or not is_few or not _are_numbers(low, high):
            return found
        current.may_decide = True
        number = current.number(low, high)
        return found if number is None else found * 0.0 + number

    return drawn


def _limits(
    a: Any = 0.0, b: Any = 1.0, size: Any = None, *, low: Any = None, high: Any = None
) -> tuple[Any, Any]:
    return (a if low is None else low), (b if high is None else high)


def _are_numbers(*limits: Any) -> bool:
    return all(isinstance(limit, int | float) for limit in limits)
