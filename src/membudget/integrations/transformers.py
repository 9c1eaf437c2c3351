"""A budget for transformers' `Trainer`, and for those built on it, such as TRL's.

trainer = Trainer(model, args, ..., callbacks=[BudgetCallback("20GiB")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from membudget.errors import MissingExtraError, OptionError
from membudget.loop import Budgeted, budget
from membudget.loop.room import OnExceed
from membudget.loop.step_needs import stepping
from membudget.planner.plan import Plan

try:
    from transformers import TrainerCallback
except ImportError:
    TrainerCallback = None

OwnCheckpointing = Literal["refuse", "replace"]


class BudgetCallback(TrainerCallback or object):  # type: ignore[misc]
    """Opens a budget when the training begins, and closes it when it ends.

    Attributes:
        fitted: What `budget` returned, with `status()` and `report()`; `None` before
            the training.
    """

    def __init__(
        self,
        asked: int | str,
        *,
        on_exceed: OnExceed = "raise",
        own_checkpointing: OwnCheckpointing = "refuse",
        plan: Plan | str | Path | None = None,
    ):
        """Store what to ask of `budget`.

        Args:
            asked: The budget, as `membudget.budget` takes it.
            on_exceed: As there.
            own_checkpointing: What to do about transformers' own activation
                checkpointing: `"refuse"` to train, or turn it off (`"replace"`).
            plan: As `budget` takes it: what `fitted.save()` wrote in an earlier run.

        Raises:
            MissingExtraError: If transformers is not installed.
            OptionError: If `own_checkpointing` is unknown.
        """
        if TrainerCallback is None:
            raise MissingExtraError("transformers", "hf", "BudgetCallback")
        if own_checkpointing not in ("refuse", "replace"):
            raise OptionError(
                "own_checkpointing must be 'refuse' or 'replace'; got "
                f"{own_checkpointing!r}"
            )
        self.fitted: Budgeted | None = None
        self._asked = asked
        self._on_exceed: OnExceed = on_exceed
        self._plan = plan
        self._own = own_checkpointing

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Open the budget on the trainer's model.

        Raises:
            OptionError: If the model checkpoints activations itself, unless that is to
                be replaced; or as `Budgeted.start` does.
        """
        self.close()
        model = given["model"]
        if getattr(model, "is_gradient_checkpointing", False):
            if self._own == "refuse":
                raise OptionError(
                    "gradient_checkpointing is on: every block would be recomputed "
                    "twice. Turn it off in TrainingArguments, or give "
                    "own_checkpointing='replace'"
                )
            model.gradient_checkpointing_disable()
        optimizers = [] if given.get("optimizer") is None else [given["optimizer"]]
        made = budget(
            model,
            self._asked,
            optimizer=stepping([model], optimizers),
            on_exceed=self._on_exceed,
            plan=self._plan,
        )
        self.fitted = made.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Close the budget."""
        self.close()

    def close(self) -> None:
        """Close the budget, as after a training that an error ended; idempotent."""
        if self.fitted is not None:
            self.fitted.stop()
