"""What happened to one region of a plan, for `status()`."""

from __future__ import annotations


class Statistics:
    """Counts over all the calls of one region.

    Attributes:
        label: The region's name, which errors use, too.
        forwards: Calls that dropped saved tensors.
        skipped: Calls in which nothing needed a gradient.
        recomputes: Times that dropped tensors were made again.
        pinned: How many values a replay region keeps because they did not come back.
    """

    __slots__ = ("forwards", "label", "pinned", "recomputes", "skipped")

    def __init__(self, label: str = ""):
        """Begin at zero."""
        self.label = label
        self.forwards = 0
        self.skipped = 0
        self.recomputes = 0
        self.pinned = 0

    def count_call(self, has_saved: bool) -> None:
        """Count a call of the region."""
        if has_saved:
            self.forwards += 1
        else:
            self.skipped += 1
