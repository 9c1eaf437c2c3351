"""Human-readable reports; this file formats tables, curves and numbers.

Only `report/__init__.py` imports rich. Rich draws from Python's `random` on import and
for some styles, so the random state is saved before each use and restored after it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Literal


@contextmanager
def _python_random_kept() -> Iterator[None]:
    """Restore the state of Python's `random` on exit."""
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
"""Width of a page; longer cells wrap."""


def rendered(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> str:
    """Return a table as text; all columns but the first `left` are right-aligned.

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
    """Return a table without rows, with the given column titles and alignments."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for title, side in columns:
        table.add_column(title, justify=side, overflow="fold")
    return table


def page(parts: Iterable[RenderableType], width: int = WIDTH) -> str:
    """Return texts and tables as one wrapped text, each part on a new line."""
    out = StringIO()
    # `markup=False`: brackets in module names must not be read as styles.
    console = Console(
        file=out, width=width, color_system=None, markup=False, highlight=False
    )
    with _python_random_kept():
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


_BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[int], columns: int) -> str:
    """Return a sparkline: each bar is the maximum of the values in its column.

    Example:
        >>> sparkline([0, 1, 4, 8, 2, 1], columns=6)
        ' ▁▄█▂▁'
    """
    count = len(values)
    top = max(values, default=0) or 1
    bars = []
    for column in range(columns if count else 0):
        start = column * count // columns
        end = max(start + 1, (column + 1) * count // columns)
        # Rounded up, so that every value above zero is visible.
        bars.append(_BARS[-(-max(values[start:end]) * 8 // top)])
    return "".join(bars)


def marks(texts: Sequence[tuple[int, str]]) -> str:
    """Return a line with each text at its column, shifted right to avoid overlap.

    Example:
        >>> marks([(0, "└forward"), (12, "└backward")])
        '└forward    └backward'
    """
    line = ""
    for column, text in texts:
        line = line.ljust(column) if len(line) <= column else f"{line} "
        line += text
    return line


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def share(part: float, total: float) -> str:
    """Format `part / total` as a percentage; zero becomes a dot."""
    return f"{part / total:.1%}" if total and part else "·"


def flops(count: int) -> str:
    """Format a number of floating-point operations with a unit.

    Example:
        >>> flops(256), flops(3_600_000_000_000)
        ('256 FLOP', '3.6 TFLOP')
    """
    value = float(count)
    if value < 1000:
        return f"{count} FLOP"
    for unit in ("kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:,.1f} PFLOP"


def time(seconds: float) -> str:
    """Format a time with a unit.

    Example:
        >>> time(0.0191), time(2.5e-6), time(3e-9)
        ('19.1 ms', '2.5 µs', '3 ns')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
