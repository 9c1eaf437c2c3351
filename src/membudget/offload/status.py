"""What was offloaded so far, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from membudget.text import format_bytes


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """What was offloaded so far; bytes are those of storages, over all steps.

    Attributes:
        host_bytes: Host memory that was allocated.
        most_host_bytes: The most of it that was in use.
        out_bytes: Copied to the host.
        first_bytes: Kept on the device, because they are asked for first.
        living_bytes: Not copied, because somebody else keeps them alive anyway.
        full_bytes: Kept on the device, because the host memory was full.
        spilled_bytes: Moved on to the disk, because the host memory was full.
        ahead_bytes: Copied back before they were asked for.
        late_bytes: Copied back when they were.
    """

    host_bytes: int
    most_host_bytes: int
    out_bytes: int
    first_bytes: int
    living_bytes: int
    full_bytes: int
    spilled_bytes: int
    ahead_bytes: int
    late_bytes: int

    def __str__(self) -> str:
        """Return a line for each number that is not 0."""
        rows = (
            ("host memory", self.host_bytes),
            ("  in use at most", self.most_host_bytes),
            ("copied to the host", self.out_bytes),
            ("  and on to the disk", self.spilled_bytes),
            ("  back, ahead of time", self.ahead_bytes),
            ("  back, when asked for", self.late_bytes),
            ("kept: needed first", self.first_bytes),
            ("kept: live anyway", self.living_bytes),
            ("kept: no room on host", self.full_bytes),
        )
        return "\n".join(f"{text:24}{format_bytes(n)}" for text, n in rows if n)
