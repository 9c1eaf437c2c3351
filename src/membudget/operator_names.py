"""Names of operators that do the same: in place or not, on whichever device."""

from __future__ import annotations

import sys

ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_flash_attention_forward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_efficient_attention_forward"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_attention_math_for_mps", "_cudnn_attention_forward"),
    "_scaled_dot_product_fused_attention_overrideable",
)

_BATCH_NORM = (
    *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    *("cudnn_batch_norm", "miopen_batch_norm"),
)

_ROLES = {
    **{f"{name}.default": "attention" for name in ATTENTION},
    **{f"{name}.default": "batch normalisation" for name in _BATCH_NORM},
}
"""What kernels do that devices choose among; the first output of each is the result."""


def role_of(name: str) -> str | None:
    """Return what an operator does, if devices have kernels of their own for it.

    Example:
        >>> role_of("aten._scaled_dot_product_flash_attention.default")
        'attention'
        >>> role_of("aten.mm.default")
    """
    return _ROLES.get(name.partition(".")[2])


def in_place_or_not(name: str) -> str:
    """Return an operator's name without the underscore that marks in-place variants.

    Example:
        >>> in_place_or_not("aten.add_.Tensor"), in_place_or_not("aten.add.Tensor")
        ('aten.add.Tensor', 'aten.add.Tensor')
    """
    return name.replace("_.", ".")


def common_name(name: str) -> str:
    """Return one name for all operators that do the same, interned.

    Fake tensors are a tensor subclass, for which torch may run `add` where a real step
    runs `add_`; another device may have another kernel.

    Example:
        >>> common_name("aten.add_.Tensor")
        'aten.add.Tensor'
        >>> common_name("aten._scaled_dot_product_flash_attention_for_cpu.default")
        'attention'
    """
    return sys.intern(role_of(name) or in_place_or_not(name))
