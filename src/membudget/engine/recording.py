"""What the forward of a region leaves behind: handles, and what they stood for."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from membudget.engine.arguments import must_keep
from membudget.engine.calls import Calls
from membudget.engine.comparison import Fingerprints, Metadata, metadata
from membudget.engine.mismatch import Trace
from membudget.engine.options import ContextPair, RegionOptions, Statistics
from membudget.engine.surroundings import GuardedSurroundings, Surroundings
from membudget.errors import CheckpointError, RecomputeMismatchError
from membudget.state.identity import address_of

# An iterator at its end, a key that is there already. No lack of memory, which is a
# RuntimeError of torch's.
_STATEFUL = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError),
    *(OSError, StopIteration, TypeError, ValueError),
)


class RerunHandle:
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


class KeptHandle(RerunHandle):
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
        handles: Of each saved tensor, in order, its handle: held weakly, because what
            is dead needs no recompute.
        metadata: Likewise its shape, dtype, device and stride.
        calls: What earlier calls of the function showed; `None` without verification.
        finished: Whether the forward has ended.
        is_new: Whether the call went unverified, along a path that no verified call
            has taken.
        holds: Whether what is saved stays until then, because the function is known, or
            may yet be found, to differentiate inside (Rule 7).
        nested_backward: Whether the function differentiates inside (Rule 7).
        fingerprints: Of each tensor's bytes, if they are to be compared.
        trace: The operators of the forward, if debugging is on.
        contexts: What `context_fn` returned, if there is one.
        lock: Held while handles are filled or emptied.
    """

    # No slots: what most calls leave as it is costs them nothing.
    finished = holds = is_new = nested_backward = False
    contexts: ContextPair | None = None
    fingerprints: Fingerprints | None = None
    trace: Trace | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
        statistics: Statistics | None,
        calls: Calls | None = None,
    ):
        """Note all that a recompute will need; the function has not run yet."""
        self.function = function
        self.options = options
        self.statistics = statistics
        kind = GuardedSurroundings if options.guards else Surroundings
        self.surroundings: Surroundings = kind(function, args, kwargs, options)
        self.handles: list[ReferenceType[RerunHandle]] = []
        self.metadata: list[Metadata] = []
        self.calls = calls
        self.lock = RLock()

    @property
    def has_saved(self) -> bool:
        """Whether the forward saved anything."""
        return bool(self.handles)

    @property
    def label(self) -> str:
        """The region's name, for errors."""
        return self.statistics.label if self.statistics is not None else ""

    def pack(self, tensor: Tensor) -> RerunHandle:
        """Note a tensor that autograd saves, and return what stands for it."""
        if tensor.is_nested and must_keep(tensor, self.surroundings.arguments):
            return KeptHandle(tensor)
        handle = RerunHandle()
        handle.tensor = None
        self.handles.append(ref(handle))
        self.metadata.append(metadata(tensor))
        return handle

    def pack_checked(self, tensor: Tensor) -> RerunHandle:
        """Do the same; take a fingerprint of the bytes, and hold the tensor."""
        handle = self.pack(tensor)
        if isinstance(handle, KeptHandle):
            return handle
        if self.fingerprints is not None:
            self.fingerprints.add(tensor)
        if self.holds:
            # Detached: the tensor's history would hold the handle.
            handle.tensor = tensor.detach()
            handle.version = None if tensor.is_inference() else tensor._version
            handle.address = address_of(tensor) or None
        return handle

    def last_needed(self) -> int:
        """Return the last index whose handle lives and is empty, or -1."""
        handles = self.handles
        for index in range(len(handles) - 1, -1, -1):
            handle = handles[index]()
            if handle is not None and handle.tensor is None:
                return index
        return -1

    def empty(self) -> None:
        """Let go of the recomputed tensors that nobody took."""
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                handle.tensor = None

    def stops_early(self) -> bool:
        """Tell whether a recompute may stop before the function's end."""
        calls = self.calls
        return self.options.early_stop and not (calls is not None and calls.fills_late)

    def note_verified(self, fills_late: bool) -> None:
        """Note that a recompute made what the forward saved, bit for bit.

        Args:
            fills_late: Whether an operator fills what it saves only after saving it.
        """
        if self.calls is not None:
            self.calls.verified(self.metadata)
            self.calls.fills_late |= fills_late

    def blame(self, error: CheckpointError) -> None:
        """Say what to do, if the region itself made its rerun differ."""
        if error.remedy:  # A region around this one failed, and this one asked it.
            return
        by_region = getattr(error, "by_region", False)
        if by_region or isinstance(error, RecomputeMismatchError):
            error.add_remedy(self._replay_from_now())

    def blame_state(self, error: Exception) -> None:
        """Say what to do, if code raised that found its own state moved on."""
        if isinstance(error, _STATEFUL):
            remedy = self._replay_from_now()
            error.add_note(f"The forward of the region raised nothing. {remedy}")

    def _replay_from_now(self) -> str:
        """Give up rerunning the function, as far as its options leave the choice.

        Returns:
            What an error says about it: what happens next, and what to do.
        """
        if self.calls is not None and self.options.may_replay:
            self.calls.owner.replays = True
            return (
                "From its next call on, the function is replayed, which runs its "
                "Python once: drop the gradients of this step, and run the step again."
            )
        return 'Give the region engine="replay", which runs its Python once.'
