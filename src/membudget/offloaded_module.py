"""Let what a module saves be offloaded, without wrapping the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from membudget.attach import Carried, carried_by, put
from membudget.engine.options import Statistics
from membudget.offload import Offload


@dataclass(slots=True)
class OffloadedModule:
    """Runs a module's forward, and what the module carried before, inside an `Offload`.

    A region that it carried holds its inputs there.
    """

    by: Offload
    inner: Carried | None
    kept: str = ""

    @property
    def statistics(self) -> Statistics | None:
        """Counters of the region inside; `None` if there is none."""
        return None if self.inner is None else self.inner.statistics

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the module's forward, and offload what autograd saves in it."""
        with self.by:
            if self.inner is not None:
                return self.inner.run(function, args, kwargs)
            return function(*args, **kwargs)


def offload_module(module: Module, by: Offload) -> None:
    """Offload what autograd saves in each call of a module."""
    put(module, OffloadedModule(by, carried_by(module)), type(module).__name__)
