"""The precisions in which kernels multiply float32: read and restored.

torch keeps one per backend and kind of operator, set through `fp32_precision`. One that
is unset ("none") follows `all` of its backend, which follows `all` of all backends. The
older names (`set_float32_matmul_precision`, `cudnn.allow_tf32`) set several of them and
remember their own values; their readers raise where the two disagree.

A reader returns the precision in force, not the one that was set. To restore exactly
what was set, it is read while everything it could follow is unset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Key = tuple[str, str]  # Backend and kind of operator.

_C: Any = torch._C
_get: Callable[[str, str], str] = _C._get_fp32_precision_getter
_set: Callable[[str, str, str], None] = _C._set_fp32_precision_setter

_GENERIC = ("generic", "all")
_KINDS = ("matmul", "conv", "rnn")
_ONEDNN = tuple(("mkldnn", kind) for kind in _KINDS)
_CUDA = tuple(("cuda", kind) for kind in _KINDS)

# CUDA's precisions follow from the older names, unless those raise.
_OLDER: dict[str, Callable[[Any], None]] = {
    "_get_float32_matmul_precision()": _C._set_float32_matmul_precision,
}
if torch.backends.cuda.is_built():
    _OLDER["_get_cudnn_allow_tf32()"] = _C._set_cudnn_allow_tf32

EXPRESSIONS = (*_OLDER, *(f"_get_fp32_precision_getter{key}" for key in _ONEDNN))


def read_each() -> tuple[str, ...]:
    """Return every precision in force, where the readers of the older names raise."""
    return tuple(_get(*key) for key in _ONEDNN + _CUDA)


def bring_back(
    wanted: tuple[Any, ...], now: tuple[Any, ...], undo: Callable[..., None]
) -> None:
    """Restore precisions that were read by `EXPRESSIONS` or by `read_each`.

    Args:
        wanted: The precisions to restore.
        now: The present precisions.
        undo: Receives what undoes each change; see `_torch_settings.bring_back`.
    """
    _undo_all(undo)
    if len(wanted) == len(now) == len(EXPRESSIONS):
        for writer, value, before in zip(_OLDER.values(), wanted, now, strict=False):
            if value != before:
                undo(writer, before)
                writer(value)
    in_force = _in_force(wanted)
    # First those that are changed through what they follow; others may follow it, too.
    for key in sorted(in_force, key=_is_default, reverse=True):
        _put_in_force(key, in_force[key])


def _in_force(read: tuple[Any, ...]) -> dict[Key, str]:
    """Return the precisions that were read, by key."""
    if len(read) != len(EXPRESSIONS):
        return dict(zip(_ONEDNN + _CUDA, read, strict=True))
    matmul, *cudnn = read[: len(_OLDER)]
    by_key = dict(zip(_ONEDNN, read[len(_OLDER) :], strict=True))
    by_key[_CUDA[0]] = "ieee" if matmul == "highest" else "tf32"
    for allow_tf32 in cudnn:
        by_key |= dict.fromkeys(_CUDA[1:], "tf32" if allow_tf32 else "ieee")
    return by_key


def _put_in_force(key: Key, value: str) -> None:
    # To kernels, "none" is "ieee"; but "ieee" does not follow anything.
    if _get(*key) == value or {_get(*key), value} == {"none", "ieee"}:
        return
    if _is_default(key):
        key = (key[0], "all")
    _set(*key, "ieee" if value == "none" else value)


def _undo_all(undo: Callable[..., None]) -> None:
    """Register to restore everything to what it was set to."""
    for key in (("mkldnn", "all"), ("cuda", "all"), *_ONEDNN, *_CUDA):
        if not _is_default(key):
            with _unset(_followed_by(key)):
                undo(_set, *key, _get(*key))


def _is_default(key: Key) -> bool:
    """Tell whether a precision was never set: it follows others, or is "tf32".

    cuDNN's start out so, and no setter can return them to that state; they are changed
    only through what they follow.
    """
    if key[0] != "cuda" or key[1] == "all":
        return False
    with _unset(_followed_by(key)):
        if _get(*key) != "tf32":
            return False
        _set("cuda", "all", "ieee")
        return _get(*key) == "ieee"


def _followed_by(key: Key) -> tuple[Key, ...]:
    return (_GENERIC,) if key[1] == "all" else (_GENERIC, (key[0], "all"))


@contextmanager
def _unset(keys: tuple[Key, ...]) -> Iterator[None]:
    """Unset precisions inside; each may follow only those before it."""
    before = []
    try:
        for key in keys:
            before.append((key, _get(*key)))
            _set(*key, "none")
        yield
    finally:
        for key, value in before:
            _set(*key, value)
