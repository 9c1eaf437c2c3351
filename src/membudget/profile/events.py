"""When the blocks of a model begin and end, and how many page faults came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from membudget._torch import tree_iter

try:
    import resource
except ImportError:  # Only Unix has it.
    resource = None  # type: ignore[assignment]

Label = tuple[str, str]
"""What happens at an event, such as `("enter", "h.3")`."""


class TimerEvents:
    """Records when blocks begin and end in the forward and backward pass.

    Attributes:
        labels: Label of each event, in the order in which the events occurred.
        readings: Reading of the clock at each event.
        faults: Page faults of the process up to each event.
    """

    def __init__(self, clock: Callable[[], Any]):
        """Start with no events; each call of `clock` returns seconds or an op index."""
        self.labels: list[Label] = []
        self.readings: list[Any] = []
        self.faults: list[int] = []
        self._clock = clock

    def note(self, event: str, name: str = "") -> None:
        """Record an event with the clock's current reading."""
        self.labels.append((event, name))
        self.readings.append(self._clock())
        self.faults.append(page_faults())

    @contextmanager
    def on(self, blocks: dict[str, Module]) -> Iterator[None]:
        """Record when `blocks` begin and end while the context is open."""
        handles = []
        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(self._entering(name)))
            handles.append(block.register_forward_hook(self._leaving(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda module, args: self.note("enter", name)

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: Module, args: Any, output: Any) -> None:
            # The block's backward starts when the gradient of its output is known.
            tensor = next(_differentiable(output), None)
            if tensor is not None:
                tensor.register_hook(lambda gradient: self.note("backward", name))
            self.note("leave", name)

        return leave


def _differentiable(output: Any) -> Iterator[Tensor]:
    for leaf in tree_iter(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            yield leaf


def page_faults() -> int:
    """Return how many pages of memory the system gave the process; 0 if unknown."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0
