"""A process group of one rank, in which stages pass tensors to each other directly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

if not dist.is_available():
    collect_ignore_glob = ["*.py"]


@pytest.fixture
def alone() -> Iterator[None]:
    """Form the group for a test."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
