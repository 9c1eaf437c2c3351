"""Make random numbers, by which models choose what they run, as large as can be.

Models skip layers at random, `if torch.rand(()) < drop`, so that each step takes other
bytes. A plan has to hold for the step that takes most, which chance seldom shows. So
single numbers, and a few that are drawn at once, are made the largest or the smallest
that can be drawn: one of the two skips no layer, whichever way a model compares. The
generator goes on as if they had been drawn.

They are set below all that records operators, so that `rand` stays one operator, and a
replay of it draws the same number. Not seen are Python's and NumPy's numbers, and what
`tolist()` and `numpy()` read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from membudget._torch_drawing import below, covered
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
        draws: What single numbers are; `None` leaves them as they are drawn.
        has_drawn: Whether one or a few were drawn.
        may_decide: Whether the value of a tensor was read after that.
    """

    draws: Draws | None
    has_drawn: bool = False
    may_decide: bool = False


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
    with covered({"uniform_": _uniform, "_local_scalar_dense": _item}):
        share_with_autograd(inner, _SHARED)
        try:
            yield inner
        finally:
            share_with_autograd(outer, _SHARED)
            if outer is not None:
                outer.has_drawn |= inner.has_drawn
                outer.may_decide |= inner.may_decide


def _uniform(
    keys: Any, tensor: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any
) -> Any:
    uniform = torch.ops.aten.uniform_.default
    drawn = below(uniform, keys, tensor, low, high, **kwargs)
    current = inherited_by_autograd(_SHARED)
    is_few = 0 < tensor.numel() <= MOST_NUMBERS and not tensor.is_meta
    if current is not None and is_few:
        current.has_drawn = True
        if current.draws is not None:
            number = low + (high - low) * _PARTS[current.draws]
            below(torch.ops.aten.fill_.Scalar, keys, tensor, number)
    return drawn


def _item(keys: Any, tensor: Tensor) -> Any:
    current = inherited_by_autograd(_SHARED)
    if current is not None and current.has_drawn:
        current.may_decide = True
    return below(ITEM, keys, tensor)
