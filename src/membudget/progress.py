"""Say what is being done: one line on a terminal, and a record in the logger.

The line is drawn on standard error and erased when its stage ends, with an error, too.
Nothing is drawn if standard error is not a terminal. The logger is called `membudget`
and prints nothing unless the program configures it.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOGGER = logging.getLogger("membudget")
_LOGGER.addHandler(logging.NullHandler())

_shown: list[str] = []  # The stages that have begun, the innermost last.


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Show what is being done for as long as the block runs; blocks may nest."""
    _LOGGER.info(what)
    _shown.append(what)
    _draw(what)
    try:
        yield
    finally:
        _shown.pop()
        _draw(_shown[-1] if _shown else "")


def _draw(what: str) -> None:
    """Replace the line on the terminal; an empty text erases it."""
    # A closed stream, or none at all, must not stop the work.
    with suppress(AttributeError, OSError, ValueError):
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            line = f"membudget: {what}"[: columns - 1] if what else ""
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
