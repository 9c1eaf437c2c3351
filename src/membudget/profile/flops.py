"""Floating-point operations of one operator.

The counts are those of torch's own counter: a product and a sum are two operations, and
only matrix products, convolutions and attention count, because the rest is bound by
memory. Kernels that torch does not count, or counts too high, are added here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import (
    conv_flop_count,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


def flops_of(operator: Any, args: Any, kwargs: dict[str, Any], output: Any) -> int:
    """Count the operations of one call.

    Args:
        operator: The overload.
        args: Its positional arguments, tensors real or fake.
        kwargs: Its keyword arguments.
        output: What it returned.

    Returns:
        The count; 0 for an operator that multiplies no matrices.

    Example:
        >>> a, b = torch.ones(2, 3), torch.ones(3, 5)
        >>> flops_of(torch.ops.aten.mm.default, (a, b), {}, a @ b)  # 2·2·3·5
        60
    """
    ours = _OURS.get(operator)
    if ours is not None:
        return ours(*args, **kwargs)
    formula = flop_registry.get(getattr(operator, "_overloadpacket", operator))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def _attention(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any
) -> int:
    shapes = (t.shape for t in (grad, query, key, value))
    return int(sdpa_backward_flop_count(*shapes))


def _lstm_layer(x: Any, weight: Any, recurrent: Any, *rest: Any, **kwargs: Any) -> int:
    """Count the two products of every time step: those of the input, of the state."""
    rows = x.shape[0] * x.shape[1]
    return 2 * int(rows) * int(weight.numel() + recurrent.numel())


def _lstm_layer_backward(x: Any, *weights: Any, **kwargs: Any) -> int:
    # Each product has two gradients, for its operand and for its weight.
    return 2 * _lstm_layer(x, *weights[:2])


def _convolution_backward(
    gradient: Any, x: Any, weight: Any, *rest: Any, **kwargs: Any
) -> int:
    """Count one convolution for each gradient; torch forgets the groups of one."""
    transposed, mask = rest[4], rest[7]
    forward = conv_flop_count(
        list(x.shape), list(weight.shape), list(gradient.shape), transposed=transposed
    )
    return int(forward) * (bool(mask[0]) + bool(mask[1]))


_ATEN = torch.ops.aten
_OURS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        _attention_backward
    ),
    _ATEN.convolution_backward.default: _convolution_backward,
    _ATEN.mkldnn_rnn_layer.default: _lstm_layer,
    _ATEN.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
}
