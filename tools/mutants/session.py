"""Run pytest in this process."""

from __future__ import annotations

from collections.abc import Sequence
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
