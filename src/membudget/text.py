"""Parse and format byte sizes, read JSON, and write files atomically."""

from __future__ import annotations

import json
import os
import re
import secrets
from decimal import Decimal
from pathlib import Path
from typing import Any

from membudget.errors import OptionError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"(\d[\d_]*\.?\d*(?:[eE][+-]?\d{1,3})?|\.\d+)\s*([A-Za-z]*)")
_MOST = 1 << 60
"""1 EiB, more than any memory: a larger size is a typing error."""


def parse_bytes(size: str | float) -> int:
    """Convert a size such as `"8GiB"` into bytes.

    Args:
        size: A number of bytes, or a number with a unit: `"8GiB"` is 8 × 1024³,
            `"8GB"` is 8 × 1000³. Units are case-insensitive.

    Returns:
        The size in bytes, rounded down.

    Raises:
        OptionError: If the size is not a number, is negative or implausibly large, or
            has an unknown unit, such as `"8G"`, which could mean GiB or GB.

    Example:
        >>> parse_bytes("8GiB"), parse_bytes("8 GB"), parse_bytes("1.5e9")
        (8589934592, 8000000000, 1500000000)
        >>> parse_bytes(4096), parse_bytes("0.5KiB")
        (4096, 512)
    """
    text = str(size).strip()
    found = None if isinstance(size, bool) else _SIZE.fullmatch(text)
    if found is None:
        raise OptionError(f"a size is a number of bytes, such as '8GiB'; got {size!r}")
    number, unit = found.groups()
    if unit.lower() not in _UNITS:
        raise OptionError(
            f"{text!r} has the unit {unit!r}; write GiB for 1024³ bytes, GB for 1000³, "
            "and KiB, MiB, TiB, KB, MB, TB likewise"
        )
    bytes_ = Decimal(number) * _UNITS[unit.lower()]
    if bytes_ > _MOST:
        raise OptionError(f"{text!r} is more than any memory has")
    return int(bytes_)


def format_bytes(size: int) -> str:
    """Format a size in bytes with a unit and one decimal.

    Example:
        >>> format_bytes(512), format_bytes(55_700_000), format_bytes(8 * 1024**3)
        ('512 B', '53.1 MiB', '8.0 GiB')
        >>> format_bytes(1023 * 1024 + 1000)
        '1.0 MiB'
    """
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in _BINARY[1:]:
        value /= 1024
        # Compare the rounded value, so that no size is written as 1024.0 KiB.
        if round(value, 1) < 1024 or unit == _BINARY[-1]:
            break
    return f"{value:.1f} {unit}"


def read_json(source: str | Path) -> Any:
    """Return the data of JSON text, or of a JSON file given by its path.

    Text is recognized by its first brace: all that membudget writes are JSON objects.

    Raises:
        ValueError: If the file cannot be read, or the text is not JSON.
    """
    text = source if isinstance(source, str) else ""
    if isinstance(source, str) and not source.strip():
        raise ValueError("it is an empty text, neither JSON nor a path")
    try:
        if not text.lstrip("\ufeff \n\r\t").startswith("{"):
            text = Path(source).read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"the file {str(source)!r} is empty")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark: save it as plain UTF-8")
        return json.loads(text)
    except OSError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deeply") from error


def write_whole(path: Path, content: str | bytes, what: str) -> None:
    """Write a file atomically: to a unique temporary name first, then rename it.

    The content reaches the disk before the rename, so that a crash leaves either the
    old file or the new one.

    Raises:
        OptionError: If the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    # Not `tempfile`, whose files only their owner can read.
    partial = path.with_name(f".membudget-{secrets.token_hex(8)}.partial")
    try:
        try:
            with partial.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise OptionError(f"{what} cannot be written: {error}") from error


def dtype_name(dtype: object) -> str:
    """Return the name of a `torch.dtype`, such as `"float32"`."""
    return str(dtype).removeprefix("torch.")


def dotted(owner: str, key: str) -> str:
    """Join a module's dotted name, "" for the model itself, and a child's name."""
    return f"{owner}.{key}" if owner else key
