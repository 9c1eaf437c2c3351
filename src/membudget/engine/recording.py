"""What the forward of a region leaves behind: handles, and what they stood for."""

from __future__ import annotations

from weakref import ReferenceType, ref

from torch import Tensor

from membudget.engine.compare import Metadata, fingerprint, metadata
from membudget.engine.trace import Trace


class Handle:
    """What autograd holds in place of a saved tensor.

    Attributes:
        tensor: The recomputed tensor, until autograd takes it.
        version: The version of the tensor's content when it was recomputed; `None` if
            the tensor may be written to.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    tensor: Tensor | None
    version: int | None


class Recording:
    """The saved tensors of one forward, in order.

    Attributes:
        handles: The handles, held weakly: those that are dead need no recompute.
        metadata: Shape, dtype, device and stride of each tensor.
        fingerprints: Of each tensor's bytes, if they are to be compared.
        trace: The operators of the forward, if debugging is on.
        finished: Whether the forward has ended.
        pending: A saved tensor whose fingerprint is not taken yet.
    """

    __slots__ = (
        "__weakref__",
        "fingerprints",
        "finished",
        "handles",
        "metadata",
        "pending",
        "trace",
    )

    def __init__(self) -> None:
        """Begin with nothing saved."""
        self.handles: list[ReferenceType[Handle]] = []
        self.metadata: list[Metadata] = []
        self.fingerprints: list[tuple[int, int]] = []
        self.pending: Tensor | None = None
        self.trace: Trace | None = None
        self.finished = False

    def pack(self, tensor: Tensor) -> Handle:
        """Note a tensor that autograd saves, and return what stands for it."""
        handle = Handle()
        handle.tensor = None
        self.handles.append(ref(handle))
        self.metadata.append(metadata(tensor))
        return handle

    def pack_with_fingerprint(self, tensor: Tensor) -> Handle:
        """Do the same, with a fingerprint of the tensor's bytes.

        An operator may save a tensor before it fills it (RReLU does), so the
        fingerprint is taken when the next tensor comes, or at the end.
        """
        self.settle()
        self.pending = tensor
        return self.pack(tensor)

    def settle(self) -> None:
        """Take the fingerprint that is still to be taken."""
        if self.pending is not None:
            self.fingerprints.append(fingerprint(self.pending))
            self.pending = None

    def last_needed(self) -> int:
        """Return the last index whose handle lives and is empty, or -1."""
        handles = self.handles
        for index in range(len(handles) - 1, -1, -1):
            handle = handles[index]()
            if handle is not None and handle.tensor is None:
                return index
        return -1

    def release(self) -> None:
        """Let go of the recomputed tensors that nobody took."""
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                handle.tensor = None
