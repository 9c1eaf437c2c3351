"""Run what `run.py test` runs: pytest in this process, and the type checker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The plugins that are off would spread tests over processes or remember failures.
OPTIONS = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
# Those that start processes would run the library where nobody watches it.
FAST = ("-m", "not slow and not distributed")


def run_pytest(arguments: Sequence[str], plugins: Sequence[Any] = ()) -> int:
    """Return pytest's exit code, with 0 where there was nothing to run."""
    import pytest

    code = pytest.main([*OPTIONS, *FAST, *arguments], plugins=list(plugins))
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def first_type_error(folder: Path, *names: str) -> str:
    """Return the first line that mypy says of some files in a folder, or nothing."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *names]
    found = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    return (found.stdout or found.stderr).partition("\n")[0] if found.returncode else ""
