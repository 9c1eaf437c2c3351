"""What decides the profile of a step, as the name under which a cache keeps it.

Two steps with the same key run the same operators on the same shapes under the same
settings on the same processor, as far as can be said before they run: the contents of
tensors are not a part of the key, and may decide how often a loop runs.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from membudget import _torch, _torch_settings
from membudget._torch import is_profiling
from membudget._torch_accelerator import name_of
from membudget.profile.devices import Device, processor_name
from membudget.profile.optimizer_step import OptimizerLike
from membudget.profile.timing import is_grouped
from membudget.state.autocast import device_types
from membudget.state.code import IndescribableError
from membudget.state.description import describe
from membudget.step import Step, device_of_model

_SCHEDULED = ("lr", "initial_lr")
"""Options of an optimizer that change in training, and decide no bytes."""


def key_of(
    step: Step, optimizer: OptimizerLike, fake: bool, device: Device | None
) -> str:
    """Return the key of a step's profile, as a text of digits.

    Raises:
        IndescribableError: If the step cannot be described, or the ranks of a process
            group must all run it.
    """
    _check_alone()
    return _digest_of(
        {
            "kind": type(step).__name__,
            "fake": fake,
            "device": device,
            "accelerators": sorted({name_of(t.device) for t in step.tensors()}),
            "autocast": _autocast(),
            **_conditions(),
            **step.decided_by(),
            "optimizer": _options(optimizer),
        }
    )


def conditions_of(model: Module, optimizer: OptimizerLike) -> str:
    """Return a digest of what decides the operators of a model beside its inputs.

    That is its code and attributes, the options of its optimizer, the versions of
    membudget and torch, torch's settings, and the machine.

    Raises:
        IndescribableError: If the model or the optimizer cannot be described.
    """
    device = name_of(device_of_model(model))
    decided_by = {"model": model, "optimizer": _options(optimizer), "device": device}
    return _digest_of({**_conditions(), **decided_by})


def _conditions() -> dict[str, Any]:
    return {
        "versions": (_own_digest(), torch.__version__, platform.python_version()),
        "machine": (processor_name(), torch.accelerator.is_available()),
        "settings": repr(_torch_settings.read()),
        "default device": torch.get_default_device(),
    }


def _digest_of(decided_by: dict[str, Any]) -> str:
    found = sha256()
    for line in describe(decided_by):
        found.update(f"{line}\n".encode())
    return found.hexdigest()


def _check_alone() -> None:
    """Reject circumstances that the key does not name."""
    if is_grouped():
        raise IndescribableError("all ranks of a process group run as many steps")
    if is_profiling():
        raise IndescribableError("a profiler is running")
    functions = [m for m in _torch.function_modes() if not _torch.is_device_context(m)]
    modes = [*functions, *_torch.dispatch_modes()]
    if modes:
        raise IndescribableError(f"it runs under a {type(modes[0]).__name__}")


def _autocast() -> list[Any]:
    states: list[Any] = [torch.is_autocast_cache_enabled()]
    for kind in device_types():
        states += kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return states


def _options(optimizer: OptimizerLike) -> Any:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    groups = [
        (group["params"], sorted(_told(group.items())))
        for group in optimizer.param_groups
    ]
    return type(optimizer), groups


def _told(options: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield options in words, which are the same for other objects that are equal.

    A loaded optimizer has copies of its options, and in another order.
    """
    for name, value in options:
        if name not in ("params", *_SCHEDULED):
            yield name, " ".join(describe(value))


@cache
def _own_digest() -> str:
    """Return the digest of this package's files: a version may be worked on."""
    found = sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
