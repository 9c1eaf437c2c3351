"""What the examples print with: tables and progress, plain where it is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

Report = Callable[[str], None]
"""Called once a step with what is to be said about it."""


def human(count_bytes: float) -> str:
    """Return a number of bytes as a person reads it.

    Example:
        >>> human(512), human(55_680_000)
        ('512 B', '53.1 MiB')
    """
    if count_bytes < 1024:
        return f"{count_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        count_bytes /= 1024
        if count_bytes < 1024:
            return f"{count_bytes:.1f} {unit}"
    return f"{count_bytes / 1024:.1f} GiB"


@contextmanager
def progress(console: Console, title: str, steps: int) -> Iterator[Report]:
    """Show how far a loop of `steps` steps has come.

    On a terminal this is a bar. Elsewhere (a pipe, a log file, CI) it is ten lines, one
    at each tenth of the way.

    Args:
        console: Where to show it.
        title: What is being done.
        steps: How often the loop will call the function it gets.

    Yields:
        The function to call after each step, with a short text about it.
    """
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), Remaining())
        text = TextColumn("{task.description} {task.fields[said]}")
        with Progress(text, *columns, console=console) as bar:
            task = bar.add_task(title, total=steps, said="")
            yield lambda said: bar.update(task, advance=1, said=said)
        return

    done = 0

    def report(said: str) -> None:
        nonlocal done
        done += 1
        if done * 10 // steps > (done - 1) * 10 // steps:
            console.print(f"{title} {done}/{steps} {said}")

    yield report
