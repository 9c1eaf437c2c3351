"""Compare a plain step with the same step under regions, bit for bit.

A checkpointed step should reproduce the plain step's loss, gradients, buffers and
random numbers. A step that deviates raises no error: training just goes slightly wrong.
`audit` runs one step with and without regions from the same state, compares every byte,
names each difference, and restores the state.

`runs` executes the three runs, `differences` compares two outcomes, and `verdict`
defines the report.

To detect bugs in the engine, an audit captures random number generators and buffers by
itself, without the engine's bookkeeping.
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
    """Run one training step with and without regions, and compare every bit.

    All runs start from the same state. Loss, outputs, gradients (and which are `None`),
    parameters, buffers and random number generators are compared byte by byte: a NaN
    equals the same NaN, and -0.0 differs from 0.0. The plain step runs twice, to check
    that it is repeatable. After the audit, parameters, gradients, buffers, attributes,
    random number generators and the batch are restored.

    `audit` accepts a model, a step function with two variants, or two step functions:

        audit(model, batch)  # regions on default_names(model)
        audit(model, batch, loss_fn, names="h.*", every=2)
        audit(step, plain=model, budgeted=other)  # runs step(model), step(other)
        audit(plain=step, budgeted=step_2, modules=model)

    Given a model, `audit` runs forward, loss and backward, without an optimizer. If the
    model already has regions, they are audited; otherwise `audit` applies regions
    temporarily. A user-defined step runs forward and backward, and its return value is
    compared too. Plain runs happen under `disable_checkpointing()`, so a step that
    calls `checkpoint` itself can serve as both variants.

    The host keeps copies of the gradients and of all tensors that the step can change:
    about three times the bytes of the parameters.

    Args:
        model: The model to audit, in the mode that is used for training.
        batch: Arguments of the model: a tuple is passed as positional arguments, a
            mapping as keyword arguments, anything else as the only argument.
        loss_fn: Function of output and batch that returns the loss. By default, the
            loss is the output if that is a scalar, else `output.loss` or
            `output["loss"]`, else the sum of all floating-point tensors in the output.
        step: Function that runs one step; called with `plain` and with `budgeted`.
        plain: Variant of the step without regions.
        budgeted: Variant of the step with regions.
        modules: Modules that the step may change, in addition to `plain` and
            `budgeted` if those are modules.
        blocks: Module classes that get a region, as in `apply`.
        names: Name patterns of the modules that get a region, as in `apply`.
        where: Predicate on name and module that selects modules, as in `apply`.
        every: Apply a region to every n-th selected module only.
        **options: Options of the regions, as in `checkpoint`.

    Returns:
        The report: `report.equal` is the verdict, and `print(report)` shows details.

    Raises:
        SelectionError: If no selected module can get a region.
        OptionError: If the arguments match none of the three call forms or mix two; if
            the model already has regions and the arguments select others; or if two
            compared models differ before the step.

    If the step raises an exception, a note on the exception names the failed run.

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

    roots = step.roots()
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
            "pass the modules that the step trains, modules=model, or there are no "
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
    """Reject a plain and a budgeted model that differ before the step."""
    if plain.roots == budgeted.roots:
        return
    state = State([*plain.roots.items(), *budgeted.roots.items()])
    left, right = Outcome(plain.roots, state), Outcome(budgeted.roots, state)
    # Unregistered tensors may differ, such as the caches of one variant.
    state_kinds = ("parameter", "buffer", "stream")
    unequal = [
        difference
        for difference in compare(left, right, "budgeted").differences
        if difference.kind in state_kinds
    ]
    if unequal:
        raise OptionError(
            f"the plain and the budgeted model differ before the step, so comparing "
            f"the step would say nothing: {unequal[0]} ({len(unequal)} differences in "
            f"all). Call budgeted.load_state_dict(plain.state_dict()) first"
        )
