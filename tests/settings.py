"""Settings that choose kernels, changed one at a time for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from membudget import _torch_settings as settings

_C: Any = torch._C
_WRITERS: dict[str, Callable[[Any], Any]] = {
    **settings._WRITERS,
    **settings._OLDER,
    **{
        f"_get_fp32_precision_getter{key}": partial(settings._set_precision, *key)
        for key in settings._ONEDNN
    },
}
EXPRESSIONS = tuple(_WRITERS)


def other(name: str, value: Any) -> Any:
    """Return another value that a setting may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[::-1]
    if isinstance(value, tuple):
        return tuple(not part for part in value)
    if members := getattr(type(value), "__members__", None):  # An enumeration in C.
        return next(member for member in members.values() if member != value)
    values = {
        "get_default_dtype()": (torch.float64, torch.float32),
        "get_num_threads()": (2, 1),
        "EINSUM['strategy']": ("greedy", "auto"),
        "_get_qengine()": _C._supported_qengines(),
        "_get_float32_matmul_precision()": ("medium", "highest"),
        "_get_cudnn_depthwise_kernel()": ("cudnn", "native", "auto"),
        "_get_sm_carveout_experimental()": (1, None),
    }
    choices = values.get(name, ("bf16", "none"))
    return next(choice for choice in choices if choice != value)


def change(name: str) -> None:
    """Set a setting, named by the expression that reads it, to another value."""
    value = settings.read()[EXPRESSIONS.index(name)]
    try:
        _WRITERS[name](other(name, value))
    except RuntimeError as error:
        pytest.skip(f"not on this processor: {error}")


@contextmanager
def kept() -> Iterator[None]:
    """Leave all settings as they were."""
    precisions = {
        key: settings._get_precision(*key)
        for key in (
            settings._GENERIC,
            ("mkldnn", "all"),
            *settings._ONEDNN,
        )
    }
    before = settings.read()
    try:
        yield
    finally:
        for position, value in enumerate(before[: len(EXPRESSIONS)]):
            if "precision" not in EXPRESSIONS[position]:
                _WRITERS[EXPRESSIONS[position]](value)
        _C._set_float32_matmul_precision("highest")
        for key, value in precisions.items():
            settings._set_precision(*key, value)
