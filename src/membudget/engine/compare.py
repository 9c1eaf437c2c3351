"""Is the recomputed tensor the one that was saved? And if not, who can say why?

Comparing is on the hot path and is a tuple of metadata. Explaining happens once, when a
region has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from membudget.callsite import CallSite
from membudget.errors import RecomputeMismatchError

Metadata = tuple[Any, ...]


def metadata(tensor: Tensor) -> Metadata:
    """Return shape, dtype, device and stride."""
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
    except (RuntimeError, NotImplementedError):  # A sparse tensor has no stride.
        return (tensor.shape, tensor.dtype, tensor.device, None)


def same_metadata(saved: Metadata, recomputed: Metadata) -> bool:
    """Compare two that are not equal at first sight.

    The stride of a dimension that has one element, or of an empty tensor, places
    nothing, and kernels differ in what they write there.
    """
    if saved[:3] != recomputed[:3] or saved[3] is None or recomputed[3] is None:
        return False
    shape = saved[0]
    return 0 in shape or all(
        size == 1 or a == b
        for size, a, b in zip(shape, saved[3], recomputed[3], strict=True)
    )


def describe(data: Metadata) -> str:
    """Return metadata as a person reads it.

    Example:
        >>> import torch
        >>> describe(metadata(torch.zeros(2, 3)))
        'float32[2, 3] on cpu, stride (3, 1)'
    """
    shape, dtype, device, stride = data
    name = str(dtype).removeprefix("torch.")
    place = "no stride" if stride is None else f"stride {stride}"
    return f"{name}{list(shape)} on {device}, {place}"


def mismatch_error(
    index: int | None,
    site: CallSite | None,
    saved: str,
    recomputed: str,
    causes: Sequence[str],
    traces: str = "",
) -> RecomputeMismatchError:
    """Return the error for a recompute that made something else than the forward.

    Args:
        index: Which saved tensor differs; `None` if their number does.
        site: Where the recompute was; `None` if it had ended.
        saved: What the forward saved.
        recomputed: What the recompute made.
        causes: What probably made the difference.
        traces: Both operator traces, if debugging was on.
    """
    what = "the number of tensors" if index is None else f"saved tensor {index}"
    lines = [
        f"the recompute of a region did not repeat its forward: {what} differs.",
        f"  saved in the forward: {saved}",
        f"  made by the recompute: {recomputed}",
    ]
    facts = {"module_path": "", "operator": "", "line": ""}
    if site is not None:
        facts = {
            "module_path": site.module_path,
            "operator": site.operator,
            "line": site.line,
        }
        where = f"module {site.module_path!r}, " if site.module_path else ""
        lines.append(f"  where: {where}{site.operator} at {site.line}")
    lines += [f"  likely cause: {cause}" for cause in causes]
    lines.append(
        traces
        or "  To see the operators of both runs, give the region debug=True or use "
        "set_checkpoint_debug_enabled(True)."
    )
    return RecomputeMismatchError(
        "\n".join(lines),
        index=index,
        saved=saved,
        recomputed=recomputed,
        causes=causes,
        **facts,
    )
