"""Text lines on what a step takes on an accelerator, and on the host beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membudget.text import format_bytes

if TYPE_CHECKING:
    from membudget.memory import DevicePeak, Peak


def memory_lines(measured: Peak[Any] | None) -> list[str]:
    """Return lines on what a step took on the accelerator; none if that was nothing."""
    if measured is None:
        return []
    host_bytes = measured.host_bytes
    return [line for d in measured.devices for line in device_lines(d, host_bytes)]


def device_lines(taken: DevicePeak, host_bytes: int) -> list[str]:
    r"""Return lines that say what the reserved bytes of a device were taken for.

    Example:
        >>> from membudget.memory import DevicePeak
        >>> taken = DevicePeak("cuda:0", 3_000_000, 0, 3_145_728, 4_194_304, 0)
        >>> print(*device_lines(taken, 2048), sep="\n")
        requested      2.9 MiB  of cuda:0, by tensors
        allocated      3.0 MiB  the same, rounded up to blocks
        reserved       4.0 MiB  of which 25.0% are in no such block: fragmentation
        host           2.0 KiB  peak of what the step allocates on the CPU
    """
    reserved = taken.reserved_bytes
    share = taken.fragmented_bytes / reserved if reserved else 0.0
    rows = (
        ("requested", taken.peak_bytes, f"of {taken.device}, by tensors"),
        ("allocated", taken.allocated_bytes, "the same, rounded up to blocks"),
        (
            "reserved",
            reserved,
            f"of which {share:.1%} are in no such block: fragmentation",
        ),
        ("host", host_bytes, "peak of what the step allocates on the CPU"),
    )
    return [f"{what:10}{format_bytes(size):>12}  {how}" for what, size, how in rows]
