"""Convert a user's memory budget into the bytes that a step may allocate."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import tree_iter
from membudget._torch_accelerator import (
    HOST,
    counts_on,
    is_on_accelerator,
    usable_bytes,
)
from membudget.errors import BudgetError, OptionError
from membudget.graph import StaticBytes, StepGraph
from membudget.memory.peak import storage_bytes
from membudget.planner.timeline import live_bytes
from membudget.profile import Profile
from membudget.text import parse_bytes

MARGIN_PERCENT = 5
"""Percentage of free memory left for what the allocator does not count."""

_USED_PERCENT = 100 - MARGIN_PERCENT


@dataclass(frozen=True)
class Budget:
    """The bytes that a training step may allocate.

    Attributes:
        step_bytes: Peak bytes that the step may add to the bytes in use before it.
        before_bytes: Bytes in use before the step: parameters, buffers, optimizer
            state and batch.
        share: What was asked for, if that is relative to the plain step.
        absent_bytes: Bytes of `before_bytes` that a first step has yet to allocate.
    """

    step_bytes: int
    before_bytes: int
    share: Share | None = None
    absent_bytes: int = 0

    @classmethod
    def of(cls, asked: int | str, plain: Profile, absent_bytes: int = 0) -> Budget:
        """Create a budget from the user's setting.

        Args:
            asked: Total bytes, such as `"8GiB"`; or a share, such as `"40%"`, of the
                bytes that the plain step allocates at its peak; or a share such as
                `"40% of activations"`: all gradients of parameters, and 40 % of what
                the peak of the plain step exceeds them by.
            plain: Profile of the plain step, without regions.
            absent_bytes: Bytes of optimizer state that does not exist yet.

        Raises:
            OptionError: If `asked` is neither a size in bytes nor a percentage.
        """
        before_bytes = plain.graph.static.total
        share = share_of(asked)
        if share is not None:
            step_bytes = share.of(plain.graph, plain.peak_bytes)
        else:
            # May be negative: the planner then refuses, and names the smallest budget.
            step_bytes = _bytes_of(asked) - before_bytes
        return cls(step_bytes, before_bytes, share, absent_bytes)

    def on_device(
        self, graph: StepGraph, reserved_bytes: int, plain_bytes: int | None
    ) -> Budget:
        """Return the budget for a device, where it bounds what the process reserves.

        Args:
            graph: The plain step.
            reserved_bytes: Bytes that the process has reserved before the step, be it
                for the model or for anything else.
            plain_bytes: Bytes that the plain step reserves beyond these, if measured.
        """
        before = reserved_bytes + self.absent_bytes
        step_bytes = self.bytes_in_all - before
        if self.share is not None:
            step_bytes = self.step_bytes
            if plain_bytes is not None:
                step_bytes = self.share.of(graph, plain_bytes)
        return replace(self, step_bytes=step_bytes, before_bytes=before)

    @property
    def bytes_in_all(self) -> int:
        """Total bytes that may be in use at any time during the step."""
        return self.step_bytes + self.before_bytes

    def __str__(self) -> str:
        """Return the budget as a phrase for error messages.

        Example:
            >>> print(Budget(2000, 500))
            2,500 bytes, of which 500 are in use before the step starts
        """
        return (
            f"{self.bytes_in_all:,} bytes, of which {self.before_bytes:,} are in use "
            "before the step starts"
        )

    def refused(self, found: str, least_bytes: int, what: str = "plan") -> BudgetError:
        r"""Return an error that states this budget and the smallest feasible one.

        Example:
            >>> error = Budget(2000, 500).refused("no plan fits in", 3000)
            >>> print(str(error).replace(": ", "\n").replace(". ", "\n"))
            no plan fits in 2,500 bytes, of which 500 are in use before the step starts
            2,000 are left for the step, and the smallest plan needs 3,000
            Smallest feasible budget
            3,500 bytes
        """
        return BudgetError(
            f"{found} {self}: {max(self.step_bytes, 0):,} are left for the step, and "
            f"the smallest {what} needs {least_bytes:,}. Smallest feasible budget: "
            f"{least_bytes + self.before_bytes:,} bytes",
            asked_bytes=self.bytes_in_all,
            least_bytes=least_bytes + self.before_bytes,
            before_bytes=self.before_bytes,
        )

    def too_small_for(self, what: str, need_bytes: int) -> BudgetError:
        r"""Return an error for what no plan lowers.

        Example:
            >>> error = Budget(2000, 500).too_small_for("the next step of Adam", 3000)
            >>> print(str(error).replace(" more", "\nmore").replace(". ", "\n"))
            the next step of Adam needs 3,000 bytes beside 500 in use,
            more than the budget of 2,500 bytes, and no plan lowers that
            Smallest feasible budget: 3,500 bytes
        """
        least_bytes = need_bytes + self.before_bytes
        return BudgetError(
            f"{what} needs {need_bytes:,} bytes beside {self.before_bytes:,} in use, "
            f"more than the budget of {self.bytes_in_all:,} bytes, and no plan lowers "
            f"that. Smallest feasible budget: {least_bytes:,} bytes",
            asked_bytes=self.bytes_in_all,
            least_bytes=least_bytes,
            before_bytes=self.before_bytes,
        )


def check_budget(asked: int | str) -> None:
    """Reject an invalid budget before any step runs.

    Raises:
        OptionError: If the budget is neither a number of bytes nor a percentage.
    """
    if share_of(asked) is None:
        _bytes_of(asked)


def _bytes_of(asked: int | str) -> int:
    """Return a budget in bytes; reject at most 1 byte, which is surely a share."""
    found = parse_bytes(asked)
    if found > 1:
        return found
    share = "40%"
    with suppress(ValueError):  # It has a unit, such as "0.4B".
        share = f"{100 * float(asked):g}%" if float(asked) else share
    raise OptionError(
        f"a budget of {asked!r} bytes is probably a mistake: give a share of the plain "
        f"step's peak, such as {share!r}, or a total in bytes, such as '8GiB'"
    )


class Share(NamedTuple):
    """A budget relative to the plain step: of its peak, or of its activations alone."""

    part: float
    is_of_activations: bool

    def of(self, graph: StepGraph, peak_bytes: int) -> int:
        """Return this share of a plain step's peak, with gradients whole if asked."""
        whole = gradient_bytes(graph) if self.is_of_activations else 0
        return whole + int(self.part * (peak_bytes - whole))


_SHARE = re.compile(r"([^%]*)%\s*(of\s+activations)?", re.IGNORECASE)


def share_of(asked: int | str) -> Share | None:
    """Return a percentage budget as a share; `None` for a budget in bytes.

    Example:
        >>> share_of("40% of activations")
        Share(part=0.4, is_of_activations=True)
        >>> share_of("8GiB")
    """
    if not isinstance(asked, str) or "%" not in asked:
        return None
    found = _SHARE.fullmatch(asked.strip())
    try:
        part = float(found[1]) / 100 if found else 0.0
    except ValueError:
        part = 0.0
    if found is None or not 0 < part <= 1:
        raise OptionError(
            "a percentage budget must be above 0 and at most 100, such as '40%' or "
            f"'40% of activations'; got {asked!r}. For more than the plain step's "
            "peak, give bytes, such as '8GiB'"
        )
    return Share(part, found[2] is not None)


def gradient_bytes(graph: StepGraph) -> int:
    """Return the most bytes of parameter gradients that a step holds at once.

    No plan lowers them, because regions drop nothing that the backward pass makes.
    """
    made = (
        (storage.birth, storage.death, storage.bytes)
        for storage in graph.storages
        if storage.kind == "gradient" and storage.birth >= graph.backward_start
    )
    return max(live_bytes(len(graph.operators), made), default=0)


def free_budget(model: Module) -> int:
    """Return the budget of those who give none: all that the model's device has.

    It is what the process has allocated there, and what is free, minus a 5 % margin.

    Raises:
        OptionError: If the model is not entirely on one device of an accelerator.
    """
    device = _device_of(model)
    free = usable_bytes(device)
    return torch.accelerator.memory_allocated(device) + free * _USED_PERCENT // 100


def absent_bytes(
    static: StaticBytes, optimizer: Any, device: torch.device = HOST
) -> int:
    """Return the bytes of optimizer state that the first step has yet to create.

    Args:
        static: What is in use before a step.
        optimizer: The optimizer, or its class.
        device: The step's device, whose bytes count.

    Example:
        >>> static = StaticBytes(parameters=100, buffers=0, inputs=20, optimizer=200)
        >>> absent_bytes(static, torch.optim.AdamW)
        200
    """
    state = getattr(optimizer, "state", None)
    leaves = tree_iter(dict(state)) if isinstance(state, dict) else ()
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    there = storage_bytes(t for t in tensors if counts_on(device, t.device))
    return max(0, static.optimizer - there)


def _device_of(model: Module) -> torch.device:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or not all(map(is_on_accelerator, devices)):
        names = " and ".join(sorted(map(str, devices))) or "no device"
        raise OptionError(
            "budget=None takes what is free on the model's accelerator; this model is "
            f"on {names}: give bytes, such as budget='8GiB'"
        )
    return devices.pop()
