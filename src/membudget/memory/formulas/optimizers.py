"""Closed forms: what an optimizer keeps for a parameter.

The parameter itself and its gradient are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from membudget.memory.formulas.shapes import check_positive

_STEP_BYTES = 4  # Each parameter has its count of steps, a tensor of one float32.


def sgd_bytes(elements: int, element_bytes: int = 4, *, momentum: bool = True) -> int:
    """Return what `torch.optim.SGD` keeps: with momentum one buffer, else nothing.

    Args:
        elements: Of the parameter, each of `element_bytes`.
        element_bytes: 4 for single precision.
        momentum: Whether the option is on.

    Raises:
        OptionError: If a size is no positive integer.

    Example:
        >>> sgd_bytes(100), sgd_bytes(100, momentum=False)
        (400, 0)
    """
    check_positive(elements=elements, element_bytes=element_bytes)
    return elements * element_bytes if momentum else 0


def adam_bytes(elements: int, element_bytes: int = 4, *, amsgrad: bool = False) -> int:
    """Return what `torch.optim.Adam` and `AdamW` keep for a parameter.

    The means of the gradient and of its square (Kingma, Ba 2014, arXiv:1412.6980,
    algorithm 1), with `amsgrad` the largest of the latter (Reddi, Kale, Kumar 2018),
    all of the parameter's dtype, and the count of steps. Not counted: a copy of the
    parameter in single precision, which some trainers add.

    Args:
        elements: Of the parameter, each of `element_bytes`.
        element_bytes: 4 for single precision.
        amsgrad: Whether the option is on.

    Raises:
        OptionError: If a size is no positive integer.

    Example:
        >>> adam_bytes(100), adam_bytes(100, element_bytes=2, amsgrad=True)
        (804, 604)
    """
    check_positive(elements=elements, element_bytes=element_bytes)
    return (3 if amsgrad else 2) * elements * element_bytes + _STEP_BYTES


def adafactor_bytes(size: Sequence[int], element_bytes: int = 4) -> int:
    """Return what `torch.optim.Adafactor` keeps for a parameter.

    The mean of the gradient's square is factored (Shazeer, Stern 2018,
    arXiv:1804.04235, section 3): each matrix, the last two dimensions, keeps a number
    for each row and one for each column; a vector keeps all. Steps are counted, too.

    Args:
        size: The parameter's shape; an element has `element_bytes`.
        element_bytes: 4 for single precision.

    Raises:
        OptionError: If a size is no positive integer.

    Example:
        >>> adafactor_bytes([10, 100]), adafactor_bytes([100])
        (444, 404)
    """
    lengths = {f"size[{i}]": length for i, length in enumerate(size)}
    check_positive(element_bytes=element_bytes, **lengths)
    if len(size) < 2:
        return math.prod(size) * element_bytes + _STEP_BYTES
    rows, columns = size[-2:]
    return math.prod(size[:-2]) * (rows + columns) * element_bytes + _STEP_BYTES
