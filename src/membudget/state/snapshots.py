"""Copies of buffers: a recompute starts from them, and its writes are undone."""

from __future__ import annotations

import torch
from torch import Tensor

from membudget import _torch
from membudget.scope import Scope
from membudget.state.identity import version_of

_SMALL_BYTES = 64 * 1024

Snapshots = list[tuple[Tensor, Tensor]]


@torch.no_grad()
def take_snapshots(buffers: list[Tensor]) -> Snapshots:
    """Copy each buffer once."""
    unique = {id(buffer): buffer for buffer in buffers}
    with _torch.without_dispatch_modes():
        return [
            (buffer, buffer.detach().clone())
            for buffer in unique.values()
            if not buffer.requires_grad
        ]


def is_small(buffer: Tensor) -> bool:
    """Tell whether a copy costs little; nobody can tell of a sparse tensor."""
    return buffer.layout is not torch.strided or buffer.nbytes <= _SMALL_BYTES


def enter_snapshots(scope: Scope, snapshots: Snapshots) -> None:
    """Put the copies into their buffers until `scope` ends; leave no version moved."""
    buffers = [buffer for buffer, _ in snapshots]
    versions = [version_of(buffer) for buffer in buffers]
    with torch.no_grad(), _torch.without_dispatch_modes():
        current = [buffer.detach().clone() for buffer in buffers]

        def undo() -> None:
            with torch.no_grad(), _torch.without_dispatch_modes():
                for buffer, content in zip(buffers, current, strict=True):
                    buffer.copy_(content)
            _torch.set_versions(buffers, versions)

        scope.callback(undo)
        for buffer, copy in snapshots:
            buffer.copy_(copy)
        # What the recompute saves has the version that it will have when this is
        # undone: a view of a wrapper cannot be told by its address.
        _torch.set_versions(buffers, versions)
