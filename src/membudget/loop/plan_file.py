"""The plan file of a training loop: write what a run learned, and begin with it.

Its first part is the plan of the situation that came most often, as `fit` writes one,
so that `apply` takes the file, too. What does not fit the models is refused; where the
same model runs other code, the file is left aside.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from membudget.errors import BudgetWarning, OptionError, PlanError
from membudget.loop.learned import Learned, kind_data, situation_plan, tail_data
from membudget.loop.root import Root
from membudget.loop.situation import key_of
from membudget.planned import check_parameters, device_type, model_parameters
from membudget.planner.loop_plan import LoopPlan, pack
from membudget.planner.plan import Plan
from membudget.planning import make_plan
from membudget.profile.key import conditions_of
from membudget.state.code import IndescribableError

_AGAIN = "Begin without it, and save a new one"


class PlanFile:
    """What a budget knew when it was opened, and what it writes in the end."""

    def __init__(self, roots: Sequence[Root], plan: Plan | str | Path | None):
        """Read a plan, if one is given.

        Raises:
            PlanError: If it does not fit the models, this torch, or is not whole.
        """
        self._roots = roots
        if plan is not None and not isinstance(plan, Plan):
            plan = Plan.from_json(plan)
        self._loops = () if plan is None else _checked(plan, roots)
        self._known = [Learned(loop) for loop in self._loops]
        self._conditions: tuple[str, ...] = ()
        self._why_not = "the budget was never open"

    def begin(self) -> None:
        """Note what decides the operators, and hand out what is known under that.

        Warns:
            BudgetWarning: If the plan was saved under other conditions.
        """
        if self._conditions:
            return
        known, self._known = self._known, []
        try:
            self._conditions = tuple(_conditions(root) for root in self._roots)
        except IndescribableError as error:
            self._why_not = str(error)
        if not known:
            return
        if self._conditions == tuple(loop.conditions for loop in self._loops):
            for root, of in zip(self._roots, known, strict=True):
                root.plans.start_from(of)
                root.awaited.most = of.most_awaited
                root.casts.direct_reads = of.direct_reads
        else:
            warnings.warn(
                "the saved plan is ignored, and every situation is recorded again: it "
                "was saved with different model code or attributes, another optimizer, "
                "other settings, versions or machine, or a different use of host "
                "memory",
                BudgetWarning,
                stacklevel=4,
            )

    def made(self) -> Plan:
        """Return the plan to save.

        Raises:
            OptionError: If nothing is known that a later run could begin with.
        """
        found = [plan for root in self._roots if (plan := _most_frequent(root))]
        if not self._conditions or not found:
            why = "no micro-batch was planned" if self._conditions else self._why_not
            raise OptionError(f"there is no plan to save: {why}")
        pairs = zip(self._roots, self._conditions, strict=True)
        loops = tuple(_loop_plan(root, conditions) for root, conditions in pairs)
        return replace(found[0], loops=loops)


def _conditions(root: Root) -> str:
    """Return a digest of what decides the operators, and by what they are timed."""
    found = conditions_of(root.model, root.steps.given)
    return found if root.host is None else f"{found} with a host"


def _checked(plan: Plan, roots: Sequence[Root]) -> tuple[LoopPlan, ...]:
    """Return what a plan says of each model.

    Raises:
        PlanError: If it was made for something else.
    """
    if not plan.loops:
        raise PlanError(
            "the plan is of a single step, and says nothing of a loop: "
            "membudget.apply(model, plan) takes it, and save() of what budget() "
            "returned writes one for budget()"
        )
    if len(plan.loops) != len(roots):
        names = ", ".join(loop.model for loop in plan.loops)
        raise PlanError(
            f"the plan was saved for {len(plan.loops)} models ({names}), and the "
            f"budget has {len(roots)}: give the same ones in the same order"
        )
    for loop, root in zip(plan.loops, roots, strict=True):
        check_parameters(root.model, loop)
        here = torch.__version__, device_type(root.model)
        for there, this, what in zip(
            (loop.torch, loop.device), here, ("under torch", "on"), strict=True
        ):
            if there != this:
                raise PlanError(
                    f"the plan was saved {what} {there}, and this is {this}, which "
                    f"may run other operators. {_AGAIN}"
                )
    return plan.loops


def _most_frequent(root: Root) -> Plan | None:
    """Return the plan of the situation that came most often; `None` without any."""
    planned = [
        (history.uses, situation)
        for situation, history in root.plans.histories.items()
        if history.predicted is not None
    ]
    if not planned:
        return None
    _, situation = max(planned, key=lambda pair: pair[0])
    history, point = root.plans.histories[situation], root.plans.reference(situation)
    assert history.predicted is not None
    schedule = point.simulated(history.predicted.schedule)
    limit_bytes, absent = history.limit_bytes, point.recording.absent
    return make_plan(point.profile, schedule, root.model, limit_bytes, absent=absent)


def _loop_plan(root: Root, conditions: str) -> LoopPlan:
    plans = root.plans
    own = [
        situation_plan(situation, history, plans.kind(situation))
        for situation, history in plans.histories.items()
        if situation.kind in plans.kinds  # Others were forgotten.
    ]
    kinds = {key_of(of): kind_data(kind) for of, kind in plans.kinds.items()}
    learned = {
        "tail": tail_data(plans.tail),
        "is_first": plans.is_first,
        "most_awaited": root.awaited.most,
        "direct_reads": root.casts.direct_reads,
        "kinds": {**plans.known.kinds, **kinds},
    }
    return LoopPlan(
        model=type(root.model).__name__,
        parameters=model_parameters(root.model),
        device=device_type(root.model),
        torch=torch.__version__,
        conditions=conditions,
        situations=(*own, *plans.known.situations.values()),
        learned=pack(learned),
    )
