"""What the recorder in C++ replaces where it serves, beside its form in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from membudget.engine.replay.living import LiveStorage, LiveTensor

# The extension module, once it has been bound to the classes of the tape.
EXTENSION: list[Any] = []

Callback = Callable[[Any], None]


def hooks_of(frame: Any) -> tuple[Any, Any]:
    """Return the saved-tensor hooks of a region's call, as bound methods."""
    if EXTENSION:
        in_cpp: tuple[Any, Any] = EXTENSION[0].hooks(frame)
        return in_cpp
    return frame._pack, frame._unpack


def callbacks_of(
    table: dict[int, LiveTensor], places: dict[int, LiveStorage]
) -> tuple[Callback, Callback]:
    """Return what to call when a tracked tensor and when a tracked storage dies."""
    if EXTENSION:
        in_cpp: tuple[Callback, Callback] = EXTENSION[0].callbacks((table, places))
        return in_cpp

    def forget(entry: LiveTensor) -> None:
        table.pop(entry.key, None)
        place = places.get(entry.address)
        if place is not None:
            place.entries.pop(entry.key, None)

    def freed(dead: LiveStorage) -> None:
        if places.get(dead.address) is dead:
            del places[dead.address]
        # `y.data =` gives a tracked tensor another storage; the epoch invalidates its
        # value.
        dead.memory.epoch += 1

    return forget, freed
