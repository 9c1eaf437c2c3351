"""A process group of one rank, in which stages pass tensors to each other directly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    collect_ignore_glob = ["*.py"]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Form the group for a test."""
    meeting = f"file://{tmp_path / 'meeting-point'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
