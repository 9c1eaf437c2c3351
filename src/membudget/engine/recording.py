"""What the forward of a region leaves behind: handles, and what they stood for."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from membudget.engine.compare import Metadata, metadata
from membudget.engine.fingerprints import Fingerprints
from membudget.engine.nested import must_keep
from membudget.engine.options import ContextPair, RegionOptions
from membudget.engine.statistics import Statistics
from membudget.engine.surroundings import GuardedSurroundings, Surroundings
from membudget.engine.trace import Trace


class Handle:
    """What autograd holds in place of a saved tensor.

    Attributes:
        tensor: The recomputed tensor, until autograd takes it.
        version: The version of the tensor's content when it was recomputed; `None` if
            the tensor may be written to, or torch counts none.
        address: Where its storage lay then, because `y.data =` exchanges it; `None`
            without guards, or without a storage.
    """

    __slots__ = ("__weakref__", "address", "tensor", "version")

    address: int | None
    tensor: Tensor | None
    version: int | None


class Kept(Handle):
    """A handle whose tensor was not dropped."""

    __slots__ = ("_kept",)

    def __init__(self, tensor: Tensor):
        """Keep a tensor."""
        self._kept = tensor
        self.version = tensor._version
        self.address = None

    @property
    def tensor(self) -> Tensor:
        """The tensor that was saved."""
        return self._kept

    @tensor.setter
    def tensor(self, value: Tensor | None) -> None:
        """Do nothing: a handle is emptied when its tensor is taken, and this is not."""


class Recording:
    """One call of a region: what it was asked, what it saw, what it saved.

    Attributes:
        function: What the region calls.
        options: The region's options.
        statistics: Where to count, if somebody counts.
        surroundings: What a recompute must see again.
        saved: Of each saved tensor, in order: its handle, held weakly, because what is
            dead needs no recompute; its shape, dtype, device and stride.
        finished: Whether the forward has ended.
        nested_backward: Whether the function differentiates inside (Rule 7).
        fingerprints: Of each tensor's bytes, if they are to be compared.
        trace: The operators of the forward, if debugging is on.
        contexts: What `context_fn` returned, if there is one.
        lock: Held while handles are filled or emptied.
    """

    __slots__ = (
        "__weakref__",
        "contexts",
        "fingerprints",
        "finished",
        "function",
        "lock",
        "nested_backward",
        "options",
        "saved",
        "statistics",
        "surroundings",
        "trace",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        statistics: Statistics | None,
    ):
        """Note all that a recompute will need; the function has not run yet."""
        self.function = function
        self.options = options
        self.statistics = statistics
        kind = GuardedSurroundings if options.guards else Surroundings
        self.surroundings: Surroundings = kind(function, args, kwargs, options)
        self.saved: list[tuple[ReferenceType[Handle], Metadata]] = []
        self.finished = False
        self.nested_backward = False
        self.fingerprints: Fingerprints | None = None
        self.trace: Trace | None = None
        self.contexts: ContextPair | None = None
        self.lock = RLock()

    @property
    def has_saved(self) -> bool:
        """Whether the forward saved anything."""
        return bool(self.saved)

    @property
    def label(self) -> str:
        """The region's name, for errors."""
        return self.statistics.label if self.statistics is not None else ""

    def pack(self, tensor: Tensor) -> Handle:
        """Note a tensor that autograd saves, and return what stands for it."""
        if tensor.is_nested and must_keep(tensor, self.surroundings.arguments):
            return Kept(tensor)
        handle = Handle()
        handle.tensor = None
        self.saved.append((ref(handle), metadata(tensor)))
        return handle

    def pack_with_fingerprint(self, tensor: Tensor) -> Handle:
        """Do the same, with a fingerprint of the tensor's bytes."""
        handle = self.pack(tensor)
        if self.fingerprints is not None and not isinstance(handle, Kept):
            self.fingerprints.add(tensor)
        return handle

    def last_needed(self) -> int:
        """Return the last index whose handle lives and is empty, or -1."""
        saved = self.saved
        for index in range(len(saved) - 1, -1, -1):
            handle = saved[index][0]()
            if handle is not None and handle.tensor is None:
                return index
        return -1

    def empty(self) -> None:
        """Let go of the recomputed tensors that nobody took."""
        for reference, _ in self.saved:
            handle = reference()
            if handle is not None:
                handle.tensor = None
