"""Tables of text, for a person to read.

Only this module imports rich, which draws from Python's `random` when it is imported
and for some styles; the user's stream must not move by it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Literal


@contextmanager
def _python_random_kept() -> Iterator[None]:
    """Leave Python's `random` as it was."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


with _python_random_kept():
    from rich.box import SIMPLE_HEAD
    from rich.console import Console, RenderableType
    from rich.padding import Padding
    from rich.table import Table

__all__ = ["Padding", "Table", "empty_table", "page", "rendered"]

WIDTH = 100
"""Of a page; a longer cell goes on in the next line."""


def rendered(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> str:
    """Return a table as text.

    Args:
        titles: Of the columns.
        rows: The cells.
        left: How many columns begin at their left; the others end at their right.

    Example:
        >>> print(rendered(("module", "bytes"), [("h.0", "12"), ("h.11", "3")]))
        module   bytes
        ──────────────
        h.0         12
        h.11         3
    """
    table = empty_table(
        *((title, "left" if i < left else "right") for i, title in enumerate(titles))
    )
    for row in rows:
        table.add_row(*row)
    return page([table])


def empty_table(*columns: tuple[str, Literal["left", "right"]]) -> Table:
    """Return a table without rows.

    Args:
        *columns: The title of each, and at which side its cells are aligned.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for title, side in columns:
        table.add_column(title, justify=side, overflow="fold")
    return table


def page(parts: Iterable[RenderableType], width: int = WIDTH) -> str:
    """Return texts and tables as one text, each on lines of its own.

    Args:
        parts: The texts and tables.
        width: Of the longest line; what is longer goes on in the next.
    """
    out = StringIO()
    # Names of modules are no markup, whatever brackets are in them.
    console = Console(
        file=out, width=width, color_system=None, markup=False, highlight=False
    )
    with _python_random_kept():
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
