"""The record of one case of the zoo, and what is expected of it.

A case builds, from seed 0, one call that may become a region: a function or module, its
arguments, and whatever else the call may change. It says what a region of
`torch.utils.checkpoint` makes of it, so that a case that nothing can get wrong is told
from one that has teeth; a test holds torch to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests import devices

TorchOutcome = Literal["right", "wrong", "raises"]


@dataclass
class Call:
    """One call that may become a region.

    Attributes:
        function: What is called: a module or a function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        state: Whatever else the call reads or changes, by name: leaves that it closes
            over, private generators, counters. Modules among `function` and the
            arguments need not be named here.
        around: Makes the context in which the forward runs; the backward runs outside.
        used: Takes from the outputs what enters the loss.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    used: Callable[[Any], Any] = lambda outputs: outputs


@dataclass(frozen=True)
class Case:
    """One awkward property.

    A reason, where it is not empty, says that something is not offered, and why.

    Attributes:
        name: The property.
        make: Builds the call, after all random streams were seeded with 0.
        not_reentrant: Why `use_reentrant=True` does not take it.
        not_twice: Why two regions in one step cannot make the call.
        not_double: Why it cannot be differentiated twice.
        refused: What the error says with which a region refuses it, as a pattern.
        torch: What `torch.utils.checkpoint(use_reentrant=False)` makes of it.
        torch_says: If that raises: what the error says, as a pattern.
        torch_on_emu: What torch's makes of it on the emulated device, if another thing.
        cpu_only: Why it is skipped on other devices.
    """

    name: str
    make: Callable[[], Call]
    not_reentrant: str = ""
    not_twice: str = ""
    not_double: str = ""
    refused: str = ""
    torch: TorchOutcome = "right"
    torch_says: str = ""
    torch_on_emu: TorchOutcome | None = None
    cpu_only: str = ""

    def build(self) -> Call:
        """Seed every global random stream and build the call."""
        # Not `torch.manual_seed`, which takes a stack trace for every kind of device
        # that is not in use.
        if self.cpu_only and not devices.is_cpu():
            pytest.skip(self.cpu_only)
        for generator in devices.default_generators():
            generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global stream is what is under test
        return self.make()

    @property
    def torch_here(self) -> TorchOutcome:
        """Return what torch's checkpoint makes of it on the device of the tests."""
        if self.torch_on_emu is None or devices.is_cpu():
            return self.torch
        return self.torch_on_emu

    @property
    def torch_needs_guards(self) -> bool:
        """Whether the guarantees of torch's own checkpoint are not enough."""
        return self.torch != "right" or bool(self.refused)

    def __str__(self) -> str:
        """Return the name, which pytest shows."""
        return self.name


CASES: list[Case] = []


def case(**expected: Any) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    """Enter the decorated builder into the zoo under its own name.

    Args:
        **expected: The attributes of `Case` that are not the default.
    """

    def enter(make: Callable[[], Call]) -> Callable[[], Call]:
        CASES.append(Case(make.__name__, make, **expected))
        return make

    return enter


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a random leaf that requires a gradient."""
    return torch.randn(*shape, dtype=dtype).requires_grad_()
