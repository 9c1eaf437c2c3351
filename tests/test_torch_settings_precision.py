"""Precisions of float32: brought back as kernels see them, undone as they were set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from membudget import _torch_settings as settings
from tests.settings import kept

KEYS = (*settings._ONEDNN, *settings._CUDA)
Setting = tuple[str, str, str]

STATES: dict[str, tuple[Setting, ...]] = {
    "as torch starts": (),
    "all": (("generic", "all", "tf32"),),
    "all in bfloat16": (("generic", "all", "bf16"),),
    "all of one backend": (("mkldnn", "all", "bf16"),),
    "one against its backend": (
        ("mkldnn", "all", "bf16"),
        ("mkldnn", "matmul", "ieee"),
        ("mkldnn", "conv", "tf32"),
    ),
    "one of CUDA": (("cuda", "matmul", "tf32"),),
    "all of CUDA": (("cuda", "all", "ieee"),),
    "matmul alone": (("mkldnn", "matmul", "bf16"),),
    "older name": (("older", "", "medium"),),
    "older name, then one": (("older", "", "high"), ("mkldnn", "matmul", "bf16")),
}


def put(state: tuple[Setting, ...]) -> None:
    """Set precisions, from those that torch starts with."""
    torch._C._set_float32_matmul_precision("highest")
    for key in (
        settings._GENERIC,
        ("mkldnn", "all"),
        ("cuda", "all"),
        *KEYS[:4],
    ):
        settings._set_precision(*key, "none")
    for backend, kind, value in state:
        if backend == "older":
            torch.set_float32_matmul_precision(value)
        else:
            settings._set_precision(backend, kind, value)


def in_force() -> list[str]:
    """Return the precisions that kernels see; to them "none" is "ieee"."""
    return [settings._get_precision(*key).replace("none", "ieee") for key in KEYS]


def what_follows() -> list[Any]:
    """Return the precisions in force under every one that they could follow."""
    found: list[Any] = [settings.read()]
    all_of_torch = settings._get_precision(*settings._GENERIC)
    for key in (settings._GENERIC, ("mkldnn", "all"), ("cuda", "all")):
        before = settings._get_precision(*key)
        for value in ("ieee", "tf32"):
            settings._set_precision(*key, value)
            found.append([settings._get_precision(*key) for key in KEYS])
        settings._set_precision(*key, before)
        settings._set_precision(*settings._GENERIC, "none")
    settings._set_precision(*settings._GENERIC, all_of_torch)
    return found


@pytest.mark.parametrize("backward", STATES)
@pytest.mark.parametrize("forward", STATES)
def test_precisions_are_brought_back_and_undone(forward: str, backward: str) -> None:
    undone: list[Any] = []
    with kept():
        put(STATES[forward])
        wanted, seen = settings.read(), in_force()
        put(STATES[backward])
        before = what_follows()
        bring_back = settings.bring_back
        now = settings.read()
        if now != wanted:
            bring_back(wanted, now, lambda *undo: undone.append(undo))
        # Without CUDA nothing but torch's own readers tells those of cuDNN.
        read = 6 if torch.backends.cuda.is_built() or len(wanted) > len(now) else 4
        assert in_force()[:read] == seen[:read]
        for function, *args in reversed(undone):
            function(*args)
        assert what_follows() == before
        put(())
