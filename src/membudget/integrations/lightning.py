"""A budget for PyTorch Lightning's `Trainer`.

trainer = Trainer(..., callbacks=[BudgetCallback("20GiB")])

`training_step` is not a forward: it calls the LightningModule or some of its children.
Which of them is only known once it makes its first call.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList

from membudget.attach import carried_by, put, remove_region
from membudget.errors import BudgetWarning, MissingExtraError, OptionError
from membudget.loop import Budgeted, budget
from membudget.loop.room import OnExceed
from membudget.loop.step_needs import stepping
from membudget.planner.plan import Plan


def _callback_class() -> type:
    """Return the library's class of callbacks; of two, that of the one in use.

    Raises:
        MissingExtraError: If Lightning is not installed.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            found: type = import_module(name).Callback
        except ModuleNotFoundError:
            continue
        return found
    raise MissingExtraError("lightning", "lightning", "BudgetCallback")


class BudgetCallback:
    """Opens a budget in the first `training_step`, and closes it after the last.

    Instances are also instances of Lightning's `Callback`.

    Attributes:
        fitted: What `budget` returned, with `status()` and `report()`; `None` before
            the first `training_step` has called a module.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> BudgetCallback:
        """Make an instance of Lightning's class, which is imported here.

        Raises:
            MissingExtraError: If Lightning is not installed.
        """
        both = type(cls.__name__, (cls, _callback_class()), {"__doc__": cls.__doc__})
        made: BudgetCallback = object.__new__(both)
        return made

    def __init__(
        self,
        asked: int | str,
        *,
        modules: Sequence[str] = (),
        on_exceed: OnExceed = "raise",
        plan: Plan | str | Path | None = None,
    ):
        """Store what to ask of `budget`.

        Args:
            asked: The budget, as `membudget.budget` takes it.
            modules: Names of the modules that `training_step` calls, as in
                `named_modules()`; `""` is the LightningModule itself. By default, the
                LightningModule or its children, whichever is called first; with several
                optimizers, its children.
            on_exceed: As there.
            plan: As there: what `fitted.save()` wrote in an earlier run.
        """
        self.fitted: Budgeted | None = None
        self._asked = asked
        self._names = [modules] if isinstance(modules, str) else list(modules)
        self._on_exceed: OnExceed = on_exceed
        self._plan = plan
        self._waiting: list[Module] = []
        self._optimizers: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the budget, or wait for the first call that tells on what.

        Raises:
            OptionError: If a name is of no module; or as `Budgeted.start` does.
        """
        self.close()
        self.fitted = None
        optimizers = list(trainer.optimizers)
        self._optimizers = optimizers
        if self._names:
            self._open(_named(pl_module, self._names))
            return
        parts = list(parts_of(pl_module))
        opened = dict.fromkeys(parts, parts)
        if len(optimizers) <= 1 and len(parts) != 1:
            opened[pl_module] = [pl_module]
        for module, modules in opened.items():
            put(module, _Waiting(partial(self._open, modules), module), "")
            self._waiting.append(module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say so if the first batch called no module that a budget could be put on."""
        if self._waiting:
            self._wait_no_more()
            warnings.warn(
                f"{type(pl_module).__name__}.training_step called neither the module "
                "itself nor one of its children, so no budget applies: pass "
                "BudgetCallback the names of the modules that it calls, modules=[...]",
                BudgetWarning,
                stacklevel=2,
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the budget."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Close the budget."""
        self.close()

    def close(self) -> None:
        """Take everything off the modules; idempotent."""
        self._wait_no_more()
        self._optimizers = []
        if self.fitted is not None:
            self.fitted.stop()

    def _open(self, modules: list[Module]) -> None:
        self._wait_no_more()
        made = budget(
            modules,
            self._asked,
            optimizer=stepping(modules, self._optimizers),
            on_exceed=self._on_exceed,
            plan=self._plan,
        )
        self.fitted = made.start()

    def _wait_no_more(self) -> None:
        for module in self._waiting:
            remove_region(module)
        self._waiting = []


class _Waiting:
    """On each module that could be what `training_step` calls, until it calls one."""

    statistics = None
    kept = ""

    def __init__(self, called: Callable[[], None], module: Module):
        """Store what to do when the module is called, with gradients."""
        self._called, self._module = called, module

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Open the budget, and run the module's forward under it."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._called()
        carried = carried_by(self._module)
        if carried is None or carried is self:
            return function(*args, **kwargs)
        return carried.run(function, args, kwargs)


def parts_of(module: Module) -> Iterator[Module]:
    """Yield the children with parameters, but none that another child holds.

    Nobody calls a container, so what it holds stands in its place.

    Example:
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> blocks = ModuleList([Linear(1, 1), Linear(1, 1)])
        >>> len(list(parts_of(Sequential(Linear(1, 1), ReLU(), blocks))))
        3
    """
    found = dict.fromkeys(_children(module))
    inside = {m for part in found for m in part.modules() if m is not part}
    yield from (part for part in found if part not in inside)


def _children(module: Module) -> Iterator[Module]:
    for child in module.children():
        if isinstance(child, ModuleList | ModuleDict):
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


def _named(module: Module, names: Sequence[str]) -> list[Module]:
    """Return modules by name.

    Raises:
        OptionError: If there is none of a name.
    """
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise OptionError(
                f"{type(module).__name__} holds no module {name!r}; its children are "
                f"{', '.join(name for name, _ in module.named_children())}"
            )
    return [known[name] for name in names]
