"""The precisions in which kernels multiply float32: read, and brought back.

torch keeps one for each backend and kind of operator, set through `fp32_precision`; one
that is unset ("none") follows `all` of its backend, and that the one of all backends.
The older names (`set_float32_matmul_precision`, `cudnn.allow_tf32`) set several of them
and remember themselves what was set; their readers raise where the two disagree.

A reader tells what is in force, not what was set. What was set is found, where it must
be put back exactly, by looking while all that it could follow is unset.
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

# What CUDA multiplies in follows from the older names where they do not raise.
_OLDER: dict[str, Callable[[Any], None]] = {
    "_get_float32_matmul_precision()": _C._set_float32_matmul_precision,
}
if torch.backends.cuda.is_built():
    _OLDER["_get_cudnn_allow_tf32()"] = _C._set_cudnn_allow_tf32

EXPRESSIONS = (*_OLDER, *(f"_get_fp32_precision_getter{key}" for key in _ONEDNN))


def read_each() -> tuple[str, ...]:
    """Return every precision in force, where the readers of older names raise."""
    return tuple(_get(*key) for key in _ONEDNN + _CUDA)


def bring_back(
    wanted: tuple[Any, ...], now: tuple[Any, ...], undo: Callable[..., None]
) -> None:
    """Bring precisions back that were read by `EXPRESSIONS` or by `read_each`.

    Args:
        wanted: The precisions to bring back.
        now: The precisions as they are.
        undo: Told what takes each change back; see `_torch_settings.bring_back`.
    """
    _undo_all(undo)
    if len(wanted) == len(now) == len(EXPRESSIONS):
        for writer, value, before in zip(_OLDER.values(), wanted, now, strict=False):
            if value != before:
                undo(writer, before)
                writer(value)
    in_force = _in_force(wanted)
    # Those that are moved by what they follow come first: others may follow it too.
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
    # To kernels "none" is "ieee", which does not follow anything.
    if _get(*key) == value or {_get(*key), value} == {"none", "ieee"}:
        return
    if _is_default(key):
        key = (key[0], "all")
    _set(*key, "ieee" if value == "none" else value)


def _undo_all(undo: Callable[..., None]) -> None:
    """Have everything put back to what it was set to."""
    for key in (("mkldnn", "all"), ("cuda", "all"), *_ONEDNN, *_CUDA):
        if not _is_default(key):
            with _unset(_followed_by(key)):
                undo(_set, *key, _get(*key))


def _is_default(key: Key) -> bool:
    """Tell whether a precision was never set: it follows others, and else is "tf32".

    cuDNN's are so at first, and no setter can make them so again; they are only ever
    moved by what they follow.
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
    """Unset precisions that follow only those before them, for as long as it takes."""
    before = []
    try:
        for key in keys:
            before.append((key, _get(*key)))
            _set(*key, "none")
        yield
    finally:
        for key, value in before:
            _set(*key, value)
