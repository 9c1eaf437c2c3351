"""How many bytes offloading may take, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass

from membudget.errors import OptionError


@dataclass(frozen=True, slots=True)
class Limits:
    """What `offload` was given, in bytes.

    Attributes:
        host_bytes: Of host memory.
        window_bytes: Of the device, for what is on its way or kept.
        first_bytes: Of these, for what is asked for first.
        smallest_bytes: Smaller storages stay on the device.
        grows: Whether host memory is allocated when it is needed.
        disk_bytes: Of a file.
        folder: Where the file is; `None` for that of temporary files.
    """

    host_bytes: int
    window_bytes: int
    first_bytes: int
    smallest_bytes: int
    grows: bool = False
    disk_bytes: int = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        """Check what no default can be meant by.

        Raises:
            OptionError: If there is no host memory.
        """
        if self.host_bytes <= 0:
            raise OptionError(
                f"host must be a number of bytes above 0; got {self.host_bytes}"
            )


def half_of_the_host() -> int:
    """Return half of the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
