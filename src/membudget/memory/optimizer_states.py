"""Closed forms for the bytes of an optimizer: its state, or what a step takes.

Not counted: the parameters themselves and their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from membudget.errors import OptionError

_STEP_BYTES = 4  # Each parameter has a step counter, a tensor of one float32.
_LBFGS_NUMBERS_BYTES = 16 * 512  # Tensors of one number; accelerators round each up.


def sgd_bytes(elements: int, element_bytes: int = 4, *, momentum: bool = True) -> int:
    """Return the state bytes of `torch.optim.SGD`: a momentum buffer, or nothing.

    Raises:
        OptionError: If a size is not a positive integer.

    Example:
        >>> sgd_bytes(100), sgd_bytes(100, momentum=False)
        (400, 0)
    """
    check_positive(elements=elements, element_bytes=element_bytes)
    return elements * element_bytes if momentum else 0


def adam_bytes(elements: int, element_bytes: int = 4, *, amsgrad: bool = False) -> int:
    """Return the state bytes of `torch.optim.Adam` or `AdamW` for one parameter.

    The state consists of the running means of the gradient and its square (Kingma, Ba
    2014, arXiv:1412.6980, algorithm 1), with `amsgrad` also the maximum of the latter
    (Reddi, Kale, Kumar 2018), all in the parameter's dtype, and a step counter. A
    single-precision copy of the parameter, which some trainers add, is not counted.

    Raises:
        OptionError: If a size is not a positive integer.

    Example:
        >>> adam_bytes(100), adam_bytes(100, element_bytes=2, amsgrad=True)
        (804, 604)
    """
    check_positive(elements=elements, element_bytes=element_bytes)
    return (3 if amsgrad else 2) * elements * element_bytes + _STEP_BYTES


def adafactor_bytes(size: Sequence[int], element_bytes: int = 4) -> int:
    """Return the state bytes of `torch.optim.Adafactor` for one parameter.

    The running mean of the squared gradient is factored (Shazeer, Stern 2018,
    arXiv:1804.04235, section 3): a matrix (the last two dimensions) needs one number
    per row and one per column, a vector one number per element. Each parameter also has
    a step counter.

    Args:
        size: Shape of the parameter.
        element_bytes: Bytes per element; 4 for single precision.

    Raises:
        OptionError: If a size is not a positive integer.

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


def lbfgs_step_bytes(parameters_bytes: int, *, searches_line: bool = False) -> int:
    """Return the most that a step of `torch.optim.LBFGS` allocates between closures.

    That is from one call of the closure to the next, or to the end of the step, above
    what is live when the closure has returned. The step takes the flat gradient, the
    new pair of its history (Liu, Nocedal 1989, "On the limited memory BFGS method for
    large scale optimization", algorithm 2.1: y and s), a copy of the gradient that the
    two loops turn into the next direction, and that direction: five times the bytes of
    the parameters. A line search, `"strong_wolfe"`, also copies the parameters and the
    gradient. Numbers, such as 1 / yᵀs, are counted as blocks of an accelerator.

    Args:
        parameters_bytes: Bytes of the parameters that it steps.
        searches_line: Whether it searches along the line.

    Raises:
        OptionError: If the size is not a positive integer.

    Example:
        >>> lbfgs_step_bytes(10_000), lbfgs_step_bytes(10_000, searches_line=True)
        (58192, 78192)
    """
    check_positive(parameters_bytes=parameters_bytes)
    return (7 if searches_line else 5) * parameters_bytes + _LBFGS_NUMBERS_BYTES


def check_positive(**sizes: int) -> None:
    """Reject sizes that are not positive integers.

    Raises:
        OptionError: If a size is not a positive integer; the message names the size.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise OptionError(
                f"{name} must be a positive integer; got {size!r}: pass 1 or more"
            )


def check_divides(name: str, divisor: int, of: str, number: int) -> None:
    """Reject a divisor that leaves a remainder.

    Raises:
        OptionError: If `divisor` does not divide `number`.
    """
    if number % divisor:
        raise OptionError(
            f"{name} must divide {of}, and {number} over {divisor} leaves "
            f"{number % divisor}: pass a divisor of {number}"
        )
