"""Write a file whole or not at all."""

from __future__ import annotations

from pathlib import Path

from membudget.errors import OptionError


def write_whole(path: Path, content: str | bytes, what: str) -> None:
    """Write a file by way of another, so that half a write clobbers nothing.

    Args:
        path: Of the file.
        content: Text or bytes.
        what: What the file is, for the error.

    Raises:
        OptionError: If it cannot be written.
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
