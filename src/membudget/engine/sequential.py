"""Run a chain of layers as regions, one per segment.

A chain of n identical layers in k segments keeps k segment inputs and, in the backward
pass, activations of n/k layers; the sum is minimal at k = √n (Chen, Xu, Zhang and
Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174,
section 4.1). The last segment is not recomputed, because its backward pass comes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

from torch.nn import Module, Sequential

from membudget.engine.options import RegionOptions, checked_options
from membudget.engine.region import run_region
from membudget.errors import OptionError

Layer = Callable[..., Any]


def segment_bounds(layers: int, segments: int) -> list[int]:
    """Split layers evenly; return the start of each segment, then the layer count.

    Segment lengths differ by at most one layer; longer segments come first.

    Raises:
        OptionError: `segments` is less than 1 or greater than the number of layers.

    Example:
        >>> segment_bounds(11, 6)
        [0, 2, 4, 6, 8, 10, 11]
    """
    if not 1 <= segments <= layers:
        raise OptionError(
            f"segments must be between 1 and the number of layers, {layers}; got "
            f"{segments}. Leave it out for √n segments."
        )
    size, longer = divmod(layers, segments)
    bounds = [0]
    for segment in range(segments):
        bounds.append(bounds[-1] + size + (segment < longer))
    return bounds


def checkpoint_sequential(
    functions: Sequential | Sequence[Layer],
    segments: int | Literal["sqrt"] | None = None,
    *inputs: Any,
    **options: Any,
) -> Any:
    """Run a chain of layers in segments; all segments but the last are regions.

    Args:
        functions: An `nn.Sequential`, or the layers in order. Each layer receives the
            output of the previous layer.
        segments: The number of segments, from 1 to the number of layers; `None` or
            `"sqrt"` selects the rounded square root of the number of layers.
        *inputs: The inputs of the first layer. With several inputs, a tuple returned by
            a layer is unpacked into arguments of the next layer; with one input, tuples
            are passed as one argument, as in `nn.Sequential`.
        **options: Options of the regions; see `checkpoint`.

    Returns:
        The output of the last layer.

    Raises:
        OptionError: The number of segments is invalid, or an option is unknown.

    Example:
        >>> import membudget as mb, torch
        >>> layers = [torch.sin] * 11
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = mb.checkpoint_sequential(layers, 6, x)
    """
    sequence = functions.children() if isinstance(functions, Module) else functions
    layers: list[Layer] = list(sequence)
    checked = checked_options(options)
    bounds = segment_bounds(len(layers), _count(segments, len(layers)))
    values = inputs
    spread = len(inputs) > 1
    for start, end in pairwise(bounds[:-1]):  # All segments but the last.
        values = _run_segment(layers[start:end], values, spread, checked)
    return _run_layers(layers[bounds[-2] :], spread, *values)


def _count(segments: int | Literal["sqrt"] | None, layers: int) -> int:
    if segments is None or segments == "sqrt":
        return max(1, round(math.sqrt(layers)))
    if not isinstance(segments, int) or isinstance(segments, bool):
        raise OptionError(f"segments must be an int or 'sqrt'; got {segments!r}")
    return segments


def _run_segment(
    layers: list[Layer], values: Any, spread: bool, options: RegionOptions
) -> tuple[Any, ...]:
    # A partial, because `reach` visits its arguments, and so finds the layers.
    function = functools.partial(_run_layers, layers, spread)
    result = run_region(function, values, {}, options)
    return result if spread and isinstance(result, tuple) else (result,)


def _run_layers(layers: list[Layer], spread: bool, *values: Any) -> Any:
    result: Any = values
    for position, layer in enumerate(layers):
        several = position == 0 or (spread and isinstance(result, tuple))
        result = layer(*result) if several else layer(result)
    return result
