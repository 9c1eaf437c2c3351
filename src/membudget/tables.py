"""Tables of text, for a person to read."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

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
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for index, title in enumerate(titles):
        justify = "left" if index < left else "right"
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    out = StringIO()
    # Names of modules are no markup, whatever brackets are in them.
    Console(
        file=out, width=WIDTH, color_system=None, markup=False, highlight=False
    ).print(table, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
