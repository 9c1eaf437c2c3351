"""Commands in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import membudget


def without_torch(more: str = "") -> str:
    """Return what the help prints, and `more` code; torch must not be imported."""
    code = (
        "import sys; from membudget.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        f"{more}\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(membudget.__file__).parents[1])},
    )
    return done.stdout
