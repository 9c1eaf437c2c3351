"""Compare a plain step with the same step under regions, bit for bit.

A checkpointed step should give the plain step's loss, gradients, buffers and random
numbers. When it does not, nothing fails: training just goes slightly wrong. `audit`
runs one step both ways from the same state, compares every byte, names what differs,
and restores everything.

`runs` has the three runs and the regions on them, `differences` the comparison of two
outcomes, `verdict` the report.

An audit uses none of the engine's bookkeeping of random streams and buffers; otherwise
it could not find errors in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, overload

from torch.nn import Module

from membudget.audit.differences import Difference, Outcome, Results, compare
from membudget.audit.runs import Run, compare_runs, counting, regions_for
from membudget.audit.verdict import AuditReport, Compared
from membudget.errors import OptionError
from membudget.selection import default_names
from membudget.state.snapshot import State
from membudget.step import LossFunction, Step

__all__ = ["AuditReport", "Compared", "Difference", "audit", "default_names"]

V = TypeVar("V")

_ABSENT: Any = object()


@overload
def audit(
    model: Module,
    batch: Any,
    loss_fn: LossFunction | None = None,
    *,
    blocks: type[Module] | tuple[type[Module], ...] | None = None,
    names: str | Iterable[str] | None = None,
    where: Callable[[str, Module], bool] | None = None,
    every: int = 1,
    **options: Any,
) -> AuditReport: ...


@overload
def audit(
    step: Callable[[V], Any],
    /,
    *,
    plain: V,
    budgeted: V,
    modules: Module | Sequence[Module] | None = None,
) -> AuditReport: ...


@overload
def audit(
    *,
    plain: Callable[[], Any],
    budgeted: Callable[[], Any],
    modules: Module | Sequence[Module],
) -> AuditReport: ...


def audit(
    model: Any = _ABSENT,
    batch: Any = _ABSENT,
    loss_fn: LossFunction | None = None,
    *,
    plain: Any = _ABSENT,
    budgeted: Any = _ABSENT,
    modules: Module | Sequence[Module] | None = None,
    blocks: type[Module] | tuple[type[Module], ...] | None = None,
    names: str | Iterable[str] | None = None,
    where: Callable[[str, Module], bool] | None = None,
    every: int = 1,
    **options: Any,
) -> AuditReport:
    """Run one training step plain and under regions, and compare every bit.

    All runs start from the same state. Loss, outputs, every gradient (and which are
    `None`), parameters, buffers, and every random stream are compared byte by byte: a
    NaN equals the same NaN, and -0.0 differs from 0.0. The plain step runs twice, to
    see whether it is repeatable at all. Afterwards parameters, gradients, buffers,
    attributes, random streams and the batch are restored.

    Three forms, for a model, for a step that takes a variant, and for two functions:

        audit(model, batch)  # regions on default_names(model)
        audit(model, batch, loss_fn, names="h.*", every=2)
        audit(step, plain=model, budgeted=other)  # runs step(model), step(other)
        audit(plain=step, budgeted=step_2, modules=model)

    The first form runs forward, loss and backward, without an optimizer. If the model
    already carries regions, those are audited; otherwise regions are applied for the
    audit only. In the other forms the user's step runs forward and backward, and what
    it returns is compared too. Plain runs happen under `disable_checkpointing()`, so a
    step that calls `checkpoint` itself can be both variants.

    An audit keeps copies of gradients and of all tensors that the step can change on
    the host: about three times the bytes of the parameters.

    Args:
        model: The model, in training mode if it trains that way.
        batch: The arguments of the model: a tuple is passed as positional arguments, a
            mapping as keywords, anything else as the only argument.
        loss_fn: Called with the output and the batch. Without it the loss is the output
            if that is one number, else `output.loss` or `output["loss"]`, else the sum
            of all floating tensors in the output.
        step: Called with `plain`, and with `budgeted`.
        plain: The variant without regions.
        budgeted: The variant with regions.
        modules: Modules that the step may change, in addition to variants that are
            modules.
        blocks: Which modules get a region: see `apply`, also for `names`, `where` and
            `every`.
        names: Patterns of module names.
        where: A predicate of name and module.
        every: Take every n-th module.
        **options: Options of the regions; see `checkpoint`.

    Returns:
        The report: `report.equal` is the verdict, `print(report)` shows the rest.

    Raises:
        SelectionError: If no module can carry a region.
        OptionError: If the arguments match none of the forms, or mix two; if the model
            already carries regions and others are asked for; or if two models that are
            compared do not start equal.

    An exception of the step propagates with a note that names the run that raised it.

    Example:
        >>> import torch
        >>> from membudget.audit import audit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
        >>> report = audit(model, torch.ones(2, 4))
        >>> report.equal, report.regions_ran
        (True, 2)
    """
    asked = {"blocks": blocks, "names": names, "where": where, **options}
    selection = {key: value for key, value in asked.items() if value is not None}
    if every != 1:
        selection["every"] = every
    if plain is _ABSENT and budgeted is _ABSENT:
        if model is _ABSENT or batch is _ABSENT or modules is not None:
            raise OptionError(_FORMS)
        return _audit_model(model, batch, loss_fn, selection)
    of_model = batch is not _ABSENT or loss_fn is not None or bool(selection)
    if plain is _ABSENT or budgeted is _ABSENT or of_model:
        raise OptionError(_FORMS)
    return _audit_step(_call if model is _ABSENT else model, plain, budgeted, modules)


_FORMS = (
    "audit takes a model and a batch, audit(model, batch, loss_fn, names=...), or two "
    "variants of a step, audit(step, plain=..., budgeted=..., modules=...)"
)


def _call(variant: Callable[[], Any]) -> Any:
    return variant()


def _audit_model(
    model: Module, batch: Any, loss_fn: LossFunction | None, selection: dict[str, Any]
) -> AuditReport:
    if not isinstance(model, Module):
        raise OptionError(f"the model must be a Module; got {type(model).__name__}")
    step = Step(model, batch, loss_fn)

    def run() -> Results:
        results = Results()
        loss = step.forward(partial(results.add, "output"))
        results.add("loss", loss)
        loss.backward()
        return results

    roots = {"": model, "batch": batch}
    if loss_fn is not None:
        roots["loss_fn"] = loss_fn
    report = compare_runs(
        Run("the plain run", run, roots),
        Run("the budgeted run", run, roots, regions_for(model, selection)),
    )
    return replace(report, loss_from=step.loss_from)


def _audit_step(
    step: Callable[[Any], Any],
    plain: Any,
    budgeted: Any,
    modules: Module | Sequence[Module] | None,
) -> AuditReport:
    shared = _named(modules)
    variants = [v for v in (plain, budgeted) if isinstance(v, Module)]
    if modules is None and not variants:
        raise OptionError(
            "name the modules that the step trains, modules=model, or there are no "
            "gradients to compare; modules=() compares only what the step returns"
        )

    def run_of(label: str, variant: Any) -> Run:
        root = {"": variant} if isinstance(variant, Module) else {}
        counted = [*root.values(), *shared.values()]
        return Run(
            label,
            lambda: Results.of(step(variant)),
            root | shared,
            partial(counting, counted),
        )

    runs = run_of("the plain run", plain), run_of("the budgeted run", budgeted)
    _check_same_start(runs[0], runs[1])
    return compare_runs(*runs)


def _named(modules: Module | Sequence[Module] | None) -> dict[str, Any]:
    if modules is None:
        return {}
    if isinstance(modules, Module):
        return {"": modules}
    if len(modules) == 1:
        return {"": modules[0]}
    return {f"modules[{i}]": module for i, module in enumerate(modules)}


def _check_same_start(plain: Run, budgeted: Run) -> None:
    """Reject two models that differ before the step."""
    if plain.roots == budgeted.roots:
        return
    state = State([*plain.roots.items(), *budgeted.roots.items()])
    left, right = Outcome(plain.roots, state), Outcome(budgeted.roots, state)
    state_kinds = ("parameter", "buffer", "stream")
    unequal = [
        difference
        for difference in compare(left, right, left.streams, "budgeted").differences
        if difference.kind in state_kinds
    ]
    if unequal:
        raise OptionError(
            f"the plain and the budgeted model differ before the step, so comparing "
            f"the step would say nothing: {unequal[0]} ({len(unequal)} differences in "
            f"all). Call budgeted.load_state_dict(plain.state_dict()) first"
        )
