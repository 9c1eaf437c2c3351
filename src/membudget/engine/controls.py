"""Context managers that control, for a block of code, how regions run.

A *switch*, a setting for one block in one thread, is an attribute of a
`threading.local`, so that it is cheap to read. A region reads its settings only in its
forward; changing them around the backward pass does not affect earlier regions.

`collect_regions` lets a program recompute regions before a backward pass needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from membudget.engine.groups import Frames, Recomputable


class _Switches(threading.local):
    """The current thread's settings; class attributes hold the defaults.

    Attributes:
        any: Whether any setting may differ from its default; if not, regions do not
            read the other attributes.
    """

    any: bool = False
    disabled: bool = False
    early_stop: bool | None = None
    debug: bool | None = None
    postponed: bool = False
    collector: Callable[[Any], None] | None = None


SWITCHES = _Switches()

# Identities of recomputing threads, once per nesting level. Appending and removing
# costs half as much as counting in a `threading.local`.
RECOMPUTING: list[int] = []


@contextmanager
def _switched(name: str, value: object) -> Iterator[None]:
    before, any_before = getattr(SWITCHES, name), SWITCHES.any
    setattr(SWITCHES, name, value)
    SWITCHES.any = True
    try:
        yield
    finally:
        setattr(SWITCHES, name, before)
        SWITCHES.any = any_before


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run regions as plain code in this thread: nothing is dropped or recomputed.

    Example:
        >>> import membudget as mb, torch
        >>> with mb.disable_checkpointing():
        ...     y = mb.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    """
    with _switched("disabled", True):
        yield


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Enable or disable early stop for regions entered in this block, in this thread.

    The setting overrides the `early_stop` argument of each region whose forward runs in
    the block, even if the recompute runs elsewhere.

    Args:
        enable: Whether a recompute stops once the last needed tensor is available.
    """
    with _switched("early_stop", enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Enable or disable debugging for regions entered in this block, in this thread.

    Args:
        enabled: Overrides the regions' `debug` argument; `None` means no override.
    """
    with _switched("debug", enabled):
        yield


@contextmanager
def verification_postponed() -> Iterator[None]:
    """Verify no call anew in this block, in this thread: the first one after it is.

    What is timed in the block is what most calls take: verification doubles some, fewer
    and fewer of them.
    """
    with _switched("postponed", True):
        yield


def is_recomputing() -> bool:
    """Return whether the calling code runs as part of a region's recompute.

    Check `is_recomputing()` before side effects that must happen once per step, such as
    appending to a list of auxiliary losses.

    Example:
        >>> import membudget as mb
        >>> if not mb.is_recomputing():
        ...     pass  # log, count, append
    """
    return threading.get_ident() in RECOMPUTING


class Regions:
    """The regions that ran inside a `collect_regions` block, weakly referenced.

    Each region lives as long as its autograd graph.
    """

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        """Create an empty collection of regions."""
        self._frames: Frames = []

    def add(self, frame: Recomputable) -> None:
        """Add a region whose forward has run."""
        self._frames.append(ref(frame))

    def __len__(self) -> int:
        """Return the number of regions that are still live."""
        return len(self._alive())

    @property
    def ran(self) -> int:
        """Number of regions that ran in the block, those no longer live included."""
        return len(self._frames)

    def recompute(self) -> None:
        """Recompute all dropped tensors before a backward pass needs them.

        The next backward pass uses and frees the recomputed tensors as usual. For
        example, a pipeline stage can recompute while it waits for a gradient. If a
        first backward pass computes gradients of inputs and later ones those of
        weights, an `execution_group` around them keeps the tensors for all of them.
        """
        for frame in self._alive():
            frame.recompute()

    def _alive(self) -> list[Recomputable]:
        frames = (reference() for reference in self._frames)
        return [frame for frame in frames if frame is not None]


@contextmanager
def collect_regions() -> Iterator[Regions]:
    """Collect the regions that run in this block, in this thread.

    Example:
        >>> import membudget as mb, torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> with mb.collect_regions() as regions:
        ...     y = mb.checkpoint(lambda x: x.sin().exp(), x)
        >>> regions.recompute()
        >>> y.sum().backward()
    """
    regions = Regions()
    with _switched("collector", regions.add):
        yield regions
