"""A plan file as one of torchtitan's ways to checkpoint activations.

Trainer.Config(..., activation_checkpoint=PlannedCheckpointing.Config(plan="plan.json"))

torchtitan applies it to the model of a rank after tensor parallelism and before
`fully_shard`, on parameters that may still be on `meta`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from membudget.apply import Applied, apply
from membudget.errors import MissingExtraError, OptionError


class _Missing:
    """Takes the place of torchtitan's class where torchtitan is not installed."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Says what to install."""

        def __post_init__(self) -> None:
            """Refuse to be made.

            Raises:
                MissingExtraError: Always.
            """
            name = "PlannedCheckpointing"
            raise MissingExtraError("torchtitan", "torchtitan", name)


_Base: Any = _Missing
try:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

    _Base = ActivationCheckpointing
except ImportError:
    pass


class PlannedCheckpointing(_Base):  # type: ignore[misc]
    """Puts the regions of a plan file on a model.

    Every region restores the random streams and compares what it recomputes, whatever
    torchtitan's own options (`preserve_rng_state`, `determinism_check`) say.

    Attributes:
        applied: What `membudget.apply` returned, with `status()`; `None` before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):  # type: ignore[misc]
        """Options of the policy.

        Attributes:
            plan: Path of the plan file, which `membudget plan --mesh ...` or
                `plan.to_json` wrote. The same file is for all ranks.
        """

        plan: str = ""

    applied: Applied | None = None

    def apply(self, model: Module) -> None:
        """Attach the plan's regions.

        Raises:
            OptionError: If no plan file is given.
            PlanError: If the plan was made for another model.
        """
        if not self.config.plan:
            raise OptionError(
                "PlannedCheckpointing needs a plan: give Config(plan='plan.json'), as "
                "`membudget plan ... -o plan.json` writes it"
            )
        self.applied = apply(model, self.config.plan)
