"""What code inside a region can say to the replay engine: names, and what is opaque."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from membudget.engine.replay.recorder import Recorder
from membudget.observer import observers


def _recorders() -> list[Recorder]:
    return [o for o in observers() if isinstance(o, Recorder)]


def name(tensor: Tensor, label: str) -> Tensor:
    """Give a tensor a name by which a policy can keep it.

    It costs nothing, and does nothing, outside of a replay region.

    Args:
        tensor: Any tensor that the code computes.
        label: The name that `membudget.policies.named(label)` keeps.

    Returns:
        `tensor` itself.

    Example:
        >>> import membudget as mb, torch
        >>> def block(x):
        ...     h = mb.name(x.sin(), "h")
        ...     return h.exp() * h.cos()
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = mb.checkpoint(block, x, keep=mb.policies.named("h"))
    """
    for recorder in _recorders():
        recorder.name(tensor, label)
    return tensor


@contextmanager
def opaque(*written: Tensor) -> Iterator[None]:
    """Mark code whose effects the dispatcher cannot see.

    A raw Triton kernel, ctypes, NumPy on shared memory: what the operators inside make
    is kept, and so are the tensors named here, which the code may write.

    Args:
        *written: Tensors that the code writes.

    Example:
        >>> import membudget as mb, torch
        >>> def halves(x):
        ...     out = torch.zeros_like(x)
        ...     with mb.opaque(out):
        ...         out.numpy()[:] = x.detach().numpy() / 2
        ...     return x * out
        >>> x = torch.ones(3, requires_grad=True)
        >>> mb.checkpoint(halves, x, engine="replay").sum().backward()
        >>> x.grad
        tensor([0.5000, 0.5000, 0.5000])
    """
    recorders = _recorders()
    for recorder in recorders:
        recorder.begin_opaque(written)
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.end_opaque(written)
