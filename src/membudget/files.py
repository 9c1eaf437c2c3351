"""Write files atomically."""

from __future__ import annotations

from pathlib import Path

from membudget.errors import OptionError


def write_whole(path: Path, content: str | bytes, what: str) -> None:
    """Write a file atomically: to a temporary name first, then rename it.

    Args:
        path: The file; an existing one is replaced.
        content: Text or bytes.
        what: Name of the content in the error message.

    Raises:
        OptionError: If the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        if isinstance(content, str):
            partial.write_text(content)
        else:
            partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise OptionError(f"{what} cannot be written: {error}") from error
