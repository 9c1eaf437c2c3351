"""How much the ranks run: what the default run of the tests asks for, or all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ranks import run_ranks


def run_share(
    request: pytest.FixtureRequest,
    factory: pytest.TempPathFactory,
    script: str,
    world_size: int,
) -> list[Any]:
    """Run a script on every rank: a share of it, unless slow tests of it run, too.

    The name of the folder tells the ranks which.
    """
    own = [item for item in request.session.items if item.path == request.path]
    slow = any(item.get_closest_marker("slow") for item in own)
    folder = factory.mktemp(script) / ("all" if slow else "quick")
    folder.mkdir()
    return run_ranks(request.path.with_name(script), folder, world_size)


def is_quick() -> bool:
    """Return whether this rank runs the share of the default run."""
    return Path(sys.argv[2]).name == "quick"
