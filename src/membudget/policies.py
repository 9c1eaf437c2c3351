"""Ready-made policies for a replay region; they compose with `|`, `&`, `~`.

>>> import membudget as mb
>>> keep = mb.policies.matmuls | mb.policies.attention
"""

from __future__ import annotations

from membudget.engine.policy import (
    Candidate,
    Policy,
    everything,
    inside,
    named,
    nothing,
    operators,
)

__all__ = [
    "Candidate",
    "Policy",
    "attention",
    "convolutions",
    "everything",
    "inside",
    "matmuls",
    "named",
    "nothing",
    "operators",
]


matmuls = operators(
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
    *("linear", "mkldnn_linear", "_addmm_activation"),
)


convolutions = operators(
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
    *("convolution_overrideable", "_slow_conv2d_forward", "conv_depthwise3d"),
    *("cudnn_convolution_transpose", "miopen_convolution"),
)


attention = operators(
    *("_scaled_dot_product_flash_attention", "_flash_attention_forward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_efficient_attention_forward"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_attention_math_for_mps", "_cudnn_attention_forward"),
    "_scaled_dot_product_fused_attention_overrideable",
)
