"""Choose the random numbers by which a step decides what it runs.

Models skip layers at random, `if torch.rand(()) < drop`, so that each step takes other
bytes. A plan has to hold for the step that takes most, which chance seldom shows. So
single numbers, and a few that are drawn at once, are made the largest or the smallest
that can be drawn, one by one: whichever way a model compares, it skips nothing then.

    draws of a forward     1st   2nd   3rd   4th   5th
    "LL-S"                 L     L     -     S     -      L: largest, S: smallest
                                                          -: as it is drawn

Rules

1. Draws count in the order in which they come, and those beyond the last letter are as
   they are drawn: a loop that draws until a number is large ends.
2. A recompute begins with the generator's state of the forward. So a draw that would
   give what an earlier one would have given is that one, and gets its letter.
3. The generator goes on as if the numbers had been drawn.
4. Numbers of torch are set below all that records operators: `rand` stays one.
   Numbers of Python and NumPy are set where their modules are asked for them, as
   `random.uniform(0, 1)` does.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from membudget._torch import is_fake
from membudget._torch_drawing import below, cover
from membudget._torch_observing import (
    ITEM,
    inherited_by_autograd,
    share_with_autograd,
)

LARGEST, SMALLEST, AS_DRAWN = "L", "S", "-"

MOST_NUMBERS = 128
"""Numbers that are drawn at once, one for each layer; more are data, such as noise."""

_RARE = 2**-10
"""Chances that are smaller are left to chance, or a plan would hold for what hardly
ever happens, such as a geometric distribution's largest number."""


@dataclass
class _Drawing:
    """What is drawn in a context of `drawing`."""

    letters: str
    on_draw: Callable[[], None]
    known: dict[float, str] = field(default_factory=dict)

    def letter(self, number: float) -> str:
        """Return the letter of a draw, of which the first number is given (Rule 2)."""
        if number not in self.known:
            self.on_draw()
            position = len(self.known)
            self.known[number] = (self.letters[position:] or AS_DRAWN)[0]
        return self.known[number]


OPERATORS = frozenset(
    (
        torch.ops.aten.rand.default,
        torch.ops.aten.rand.generator,
        torch.ops.aten.rand_like.default,
        torch.ops.aten.uniform_.default,
    )
)
"""Those that draw the numbers of torch that are set."""

_SHARED = "membudget.drawing"  # Also with the threads that run the backward pass.
# A process that a step forks, such as a worker that loads data, draws as it likes.
os.register_at_fork(after_in_child=lambda: share_with_autograd(None, _SHARED))


@contextmanager
def drawing(letters: str, on_draw: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Set the random numbers of a step of this thread, one or a few at once.

    Args:
        letters: One for each draw. Without letters, nothing of torch is covered.
        on_draw: Called for each draw, but without letters not for those of torch.

    Example:
        >>> import torch
        >>> with drawing("LS"):
        ...     print(torch.rand(()) > 0.999, torch.rand(()) < 0.001)
        tensor(True) tensor(True)
    """
    outer = inherited_by_autograd(_SHARED)
    with _covered():
        if letters:
            cover({"uniform_": _uniform})
        share_with_autograd(_Drawing(letters, on_draw), _SHARED)
        try:
            yield
        finally:
            share_with_autograd(outer, _SHARED)


# Numbers of torch.


def _uniform(
    keys: Any, tensor: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any
) -> Any:
    uniform = torch.ops.aten.uniform_.default
    drawn = below(uniform, keys, tensor, low, high, **kwargs)
    current = inherited_by_autograd(_SHARED)
    if current is not None and current.letters and is_draw(tensor):
        first = below(ITEM, keys, below(torch.ops.aten.min.default, keys, tensor))
        letter = current.letter(first)
        if letter != AS_DRAWN:
            rare = max(_RARE, torch.finfo(tensor.dtype).eps / 2)
            number = _number(letter, low, high, rare)
            below(torch.ops.aten.fill_.Scalar, keys, tensor, number)
    return drawn


def _number(letter: str, low: float, high: float, rare: float = _RARE) -> float:
    return low + (high - low) * (1 - rare if letter == LARGEST else rare)


def is_draw(tensor: Tensor) -> bool:
    """Return whether a tensor of random numbers may decide what a step runs."""
    is_few = 0 < tensor.numel() <= MOST_NUMBERS
    has_values = not (tensor.is_meta or is_fake(tensor))
    return is_few and has_values and tensor.is_floating_point()


# Numbers of Python and of NumPy.


class _Covered:
    """Functions that draw, covered in all threads as long as one is in a context."""

    lock = Lock()
    contexts = 0
    undo = ExitStack()


@contextmanager
def _covered() -> Iterator[None]:
    with _Covered.lock:
        if not _Covered.contexts:
            for module, names in _modules():
                for name in names.split():
                    function = getattr(module, name)
                    setattr(module, name, _in_range(function))
                    _Covered.undo.callback(setattr, module, name, function)
        _Covered.contexts += 1
    try:
        yield
    finally:
        with _Covered.lock:
            _Covered.contexts -= 1
            if not _Covered.contexts:
                _Covered.undo.close()


def _modules() -> Iterator[tuple[Any, str]]:
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
        is_few = 0 < getattr(found, "size", 1) <= MOST_NUMBERS
        current = inherited_by_autograd(_SHARED)
        # Arrays of limits are of NumPy: so many are data.
        if current is None or not is_few or not _are_numbers(low, high):
            return found
        first = found if isinstance(found, float) else float(found.flat[0])
        letter = current.letter(first)
        if letter == AS_DRAWN:
            return found
        return found * 0.0 + _number(letter, low, high)

    return drawn


def _limits(
    a: Any = 0.0, b: Any = 1.0, size: Any = None, *, low: Any = None, high: Any = None
) -> tuple[Any, Any]:
    return (a if low is None else low), (b if high is None else high)


def _are_numbers(*limits: Any) -> bool:
    return all(isinstance(limit, int | float) for limit in limits)
