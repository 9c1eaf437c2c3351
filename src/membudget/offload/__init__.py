"""Offload what autograd saves, around any code.

`offload` is the way in. `slab` is the host memory, `saved_storage` one storage and the
views of it, `link` the copies beside the device's work, `order` and `steps` what
earlier steps asked for, `window` the device's bytes, `disk` and `spill` what is for a
full host, and `lane` moves the storages of one device by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    is_fake,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
)
from membudget._torch_accelerator import kind
from membudget.offload.disk import Disk
from membudget.offload.lane import Lane
from membudget.offload.limits import Limits, half_of_the_host
from membudget.offload.saved_storage import Kept, View
from membudget.offload.slab import Slab
from membudget.offload.status import OffloadStatus
from membudget.state.identity import address_of, is_leaf, version_of
from membudget.text import parse_bytes


class Held:
    """A tensor that an `Offload` holds, wherever its bytes are."""

    __slots__ = ("_lane", "_view")

    def __init__(self, lane: Lane, view: View):
        """Note which lane serves a view."""
        self._lane = lane
        self._view = view

    def restored(self) -> Tensor:
        """Return the tensor, for the stream that is current.

        Raises:
            ChangedSinceForwardError: If it was written to since `check_from_now`.
        """
        return self._lane.ask(self._view)

    def before_write(self) -> None:
        """Let work that is launched now write to the tensor that is held."""
        self._lane.before_write(self._view)

    def check_from_now(self) -> None:
        """Let writes from now on be errors, without `before_write`."""
        self._view.check_from_now()


class Offload:
    """Offloads what autograd saves while it is entered; made by `offload`.

    It may be entered again for each step, in any thread, and inside of itself. Backward
    passes may run after it was left. A policy (`policies.offloaded`) and the option
    `offload` of a region use it without entering it.
    """

    def __init__(self, limits: Limits):
        """Store the limits; memory is allocated on first use."""
        self._limits = limits
        self._window_bytes = limits.window_bytes
        self._slab: Slab | None = None
        self._disk: Disk | None = None
        self._lane_by_device: dict[torch.device, Lane] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Offload], tuple[Limits]]:
        """Pickle the limits: another process has host memory of its own."""
        return Offload, (self._limits,)

    def __deepcopy__(self, memo: dict[int, object]) -> Offload:
        """Return itself: a copy of a model shares the host memory."""
        return self

    def __enter__(self) -> Offload:
        """Begin to offload.

        Raises:
            OptionError: If the host or the disk has not that much room.
        """
        self.open()
        push_saved_tensors_hooks(self._pack, _unpack)
        return self

    def open(self) -> tuple[Slab, Disk | None]:
        """Allocate the host memory and the file, if that has not been done.

        Raises:
            OptionError: If the host or the disk has not that much room.
        """
        limits = self._limits
        with self._lock:
            if self._slab is None:
                if limits.disk_bytes:
                    self._disk = Disk(limits.disk_bytes, limits.folder)
                device = torch.device(kind() or "cpu")
                self._slab = Slab(limits.host_bytes, device, limits.grows)
            return self._slab, self._disk

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Save tensors as usual from here on."""
        pop_saved_tensors_hooks()
        for lane in self._lanes:
            lane.tidy()

    @property
    def _lanes(self) -> list[Lane]:
        """The lanes of all devices; each may be added by its own thread of autograd."""
        return list(self._lane_by_device.values())

    @property
    def window_bytes(self) -> int:
        """Bytes on each device for what is on its way; a change counts from now on."""
        return self._window_bytes

    @window_bytes.setter
    def window_bytes(self, window_bytes: int) -> None:
        with self._lock:
            self._window_bytes = window_bytes
            for lane in self._lanes:
                lane.window.limit_bytes = window_bytes

    def used_bytes(self) -> int:
        """Return the bytes of host memory that hold something now."""
        for lane in self._lanes:
            lane.tidy()
        return self._slab.used_bytes if self._slab else 0

    def status(self) -> OffloadStatus:
        """Return what was offloaded so far, printable."""
        moved = {
            name: sum(lane.moved_bytes[name] for lane in self._lanes)
            for name in ("out", "first", "living", "full", "spilled", "ahead", "late")
        }
        return OffloadStatus(
            host_bytes=self._slab.size if self._slab else 0,
            most_host_bytes=self._slab.most_used_bytes if self._slab else 0,
            **{f"{name}_bytes": size for name, size in moved.items()},
        )

    def hold(self, tensor: Tensor) -> Held | None:
        """Hold a tensor that is complete; return `None` if it must stay where it is.

        Raises:
            OptionError: If the host has not the memory that was asked for.
        """
        if not self._may_move(tensor):
            return None
        lane = self._lane_of(tensor.device)
        return Held(lane, lane.hold(tensor))

    @property
    def hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Functions that hold a tensor that is complete, and return it again."""
        return self._pack_complete, _unpack

    def _pack(self, tensor: Tensor) -> Held | Kept:
        if not self._may_move(tensor):
            return Kept(tensor)
        lane = self._lane_of(tensor.device)
        return Held(lane, lane.save(tensor))

    def _pack_complete(self, tensor: Tensor) -> Held | Kept:
        held = self.hold(tensor)
        if held is None:
            return Kept(tensor)
        held.check_from_now()
        return held

    def _lane_of(self, device: torch.device) -> Lane:
        found = self._lane_by_device.get(device)
        if found is not None:
            return found
        places, limits = self.open(), self._limits
        with self._lock:
            if device not in self._lane_by_device:
                limits = replace(limits, window_bytes=self._window_bytes)
                self._lane_by_device[device] = Lane(device, places, limits)
            return self._lane_by_device[device]

    def _may_move(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.layout == torch.strided
            and tensor.device.type == (kind() or "cpu")
            and address_of(tensor) != 0
            and not is_fake(tensor)
            and version_of(tensor) >= 0
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= self._limits.smallest_bytes
            and not _is_of_parameter(tensor)
        )


def _unpack(packed: Held | Kept) -> Tensor:
    return packed.restored()


def _is_of_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a leaf, as the weight of a linear layer."""
    base = tensor if tensor._base is None else tensor._base
    return base.requires_grad and is_leaf(base)


def offload(
    host: int | str | None = None,
    *,
    window: int | str = "512MiB",
    smallest: int | str = "64KiB",
    first: int | str | None = None,
    disk: int | str = 0,
    folder: str | Path | None = None,
) -> Offload:
    """Offload what autograd saves to host memory, around any code.

    Copies run beside the device's work. The first step notes the order in which its
    backward pass asks for what was saved; later steps of the same sizes copy back in
    that order, ahead of time, and keep on the device what is asked for first. Values
    are bitwise those of the plain step: nothing is recomputed. Storages are copied
    whole, once for all tensors that view one.

    Args:
        host: Bytes of host memory, allocated once, page-locked where there is an
            accelerator. Where it is full, tensors stay on the device. Without it, up
            to half of the host's memory, allocated on demand.
        window: Device bytes for storages that are being copied out, were prefetched, or
            stay because the backward pass needs them first.
        first: Bytes of the window for what is asked for first; by default half of it. 0
            where a plan decides what stays.
        smallest: Storages of fewer bytes stay on the device. So do parameters, tensor
            subclasses, and tensors that are not strided.
        disk: Bytes of a file, created once. When host memory is full, the storages
            saved first move on to it. The file has no name, so it disappears with the
            process.
        folder: Where the file is; by default where temporary files are.

    Returns:
        A context manager. Make one, and enter it in every step.

    Raises:
        OptionError: If a size is not a valid number of bytes.

    Note:
        On a machine without an accelerator, tensors are copied from host memory to host
        memory, which saves nothing, and shows that a step keeps its bits.

    Example:
        >>> import membudget as mb, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        >>> off = mb.offload("8MiB")
        >>> for _ in range(2):
        ...     with off:
        ...         loss = model(torch.randn(512, 256)).square().mean()
        ...     loss.backward()
        >>> 0 < off.status().most_host_bytes <= off.status().host_bytes
        True
    """
    window_bytes = parse_bytes(window)
    return Offload(
        Limits(
            half_of_the_host() if host is None else parse_bytes(host),
            window_bytes,
            window_bytes // 2 if first is None else parse_bytes(first),
            parse_bytes(smallest),
            host is None,
            parse_bytes(disk),
            None if folder is None else str(folder),
        )
    )


@cache
def shared_offload() -> Offload:
    """Return the one of this process, for those who cannot be given another."""
    return offload(smallest=1, first=0)
