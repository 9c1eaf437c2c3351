"""What happened to one region of a plan, for `status()`."""

from __future__ import annotations


class Statistics:
    """Counts over all the calls of one region.

    Attributes:
        label: The region's name, which errors use, too.
        forwards: Calls that dropped saved tensors.
        skipped: Calls in which nothing needed a gradient.
        recomputes: Times that the function was run again.
    """

    __slots__ = ("forwards", "label", "recomputes", "skipped")

    def __init__(self, label: str = ""):
        """Begin at zero."""
        self.label = label
        self.forwards = 0
        self.skipped = 0
        self.recomputes = 0
