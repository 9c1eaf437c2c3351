"""Plans as a person reads them: one plan, or what differs between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from membudget.planner.plan import KeptOutput, Plan, RegionPlan
from membudget.sizes import format_bytes
from membudget.tables import rendered

MOST = 8
"""How many numbers of one operator a report shows; the plan holds them all."""


PLAIN_FITS = "the plain step fits: no region is needed"


def described(plan: Plan) -> str:
    """Return what a plan predicts, and what each of its regions keeps."""
    if not plan.regions:
        return f"{head(plan)}\n\n{PLAIN_FITS}"
    rows = [
        (region.path or "(the model)", str(region.operators), kept_text(region.kept))
        for region in plan.regions
    ]
    return f"{head(plan)}\n\n{rendered(('region', 'operators', 'keeps'), rows, left=3)}"


def head(plan: Plan, measured_bytes: int | None = None) -> str:
    """Return what a plan predicts, beside what was measured.

    Example:
        >>> plan = Plan("GPT", "0f" * 32, 2048, 4096, 2000, 1.25, 1.01, "cpu", ())
        >>> print(head(plan, 1990))
        GPT: 0 regions, seconds cpu
        budget         2.0 KiB  above what is there before the step
        plain          4.0 KiB  peak of the plain step
        predicted      2.0 KiB  peak under the plan
        measured       1.9 KiB  0.9950 of the predicted, 97.2% of the budget
        slowdown         1.250  predicted; no schedule is below 1.010
    """
    count = len(plan.regions)
    lines = [
        f"{plan.model}: {count} region{'' if count == 1 else 's'}, seconds {plan.cost}",
        f"budget    {_bytes(plan.budget_bytes)}  above what is there before the step",
        f"plain     {_bytes(plan.plain_peak_bytes)}  peak of the plain step",
        f"predicted {_bytes(plan.peak_bytes)}  peak under the plan",
    ]
    if measured_bytes is not None:
        ratio = measured_bytes / plan.peak_bytes if plan.peak_bytes else 1.0
        share = measured_bytes / plan.budget_bytes if plan.budget_bytes else 1.0
        lines.append(
            f"measured  {_bytes(measured_bytes)}  {ratio:.4f} of the predicted, "
            f"{share:.1%} of the budget"
        )
    lines.append(
        f"slowdown  {plan.slowdown:12.3f}  predicted; no schedule is below "
        f"{plan.bound:.3f}"
    )
    return "\n".join(lines)


def kept_text(kept: Iterable[KeptOutput]) -> str:
    """Return operators whose outputs stay, by their names and numbers.

    Example:
        >>> norm = "aten.native_layer_norm.default"
        >>> kept_text([KeptOutput(n, out, norm) for n in (1, 9) for out in (0, 1)])
        'native_layer_norm #1 #9'
        >>> kept_text([])
        'nothing'
    """
    numbers: dict[str, list[int]] = {}
    for output in kept:
        of_name = numbers.setdefault(short_name(output.operator), [])
        if output.number not in of_name:
            of_name.append(output.number)
    texts = []
    for name, found in numbers.items():
        texts.append(" ".join([name, *(f"#{number}" for number in found[:MOST])]))
        if found[MOST:]:
            texts[-1] += f" and {len(found) - MOST} more"
    return ", ".join(texts) or "nothing"


def short_name(operator: str) -> str:
    """Return the name of an operator without its namespace and overload if usual.

    Example:
        >>> short_name("aten.addmm.default"), short_name("aten.add.Tensor")
        ('addmm', 'add.Tensor')
    """
    return operator.removeprefix("aten.").removesuffix(".default")


def differences(first: Plan, second: Plan) -> list[str]:
    """Return one line for each thing in which two plans differ; none if they are equal.

    Example:
        >>> import dataclasses
        >>> plan = Plan("GPT", "0f" * 32, 1024, 4096, 1000, 1.25, 1.0, "cpu", ())
        >>> differences(plan, dataclasses.replace(plan, budget_bytes=2048))
        ['budget: 1.0 KiB (1,024 bytes) -> 2.0 KiB (2,048 bytes)']
        >>> differences(plan, plan)
        []
    """
    found = [*_models(first, second), *_predictions(first, second)]
    found += _regions(first.regions, second.regions)
    if not found and first != second:
        found.append("the regions stand in another order, or one stands there twice")
    return found


def _models(first: Plan, second: Plan) -> Iterator[str]:
    if first.model != second.model:
        yield f"model: {first.model} -> {second.model}"
    if first.fingerprint != second.fingerprint:
        yield (
            "parameters: the plans are for different models (fingerprints "
            f"{first.fingerprint[:12]} -> {second.fingerprint[:12]})"
        )


def _predictions(first: Plan, second: Plan) -> Iterator[str]:
    for name, label in (
        ("budget_bytes", "budget"),
        ("plain_peak_bytes", "plain peak"),
        ("peak_bytes", "predicted peak"),
    ):
        sizes = [getattr(plan, name) for plan in (first, second)]
        if sizes[0] != sizes[1]:
            texts = [f"{_bytes(size).strip()} ({size:,} bytes)" for size in sizes]
            yield f"{label}: {' -> '.join(texts)}"
    for name, label in (
        ("slowdown", "slowdown"),
        ("bound", "least slowdown"),
        ("cost", "seconds"),
    ):
        values = [getattr(plan, name) for plan in (first, second)]
        if values[0] != values[1]:
            yield f"{label}: {values[0]} -> {values[1]}"


def _output(kept: KeptOutput) -> str:
    """Return one output, such as `max #3 (output 1)`."""
    which = f" (output {kept.output})" if kept.output else ""
    return f"{short_name(kept.operator)} #{kept.number}{which}"


def _regions(
    first: Iterable[RegionPlan], second: Iterable[RegionPlan]
) -> Iterator[str]:
    before = {region.path: region for region in first}
    after = {region.path: region for region in second}
    for path in dict.fromkeys([*before, *after]):
        left, right = before.get(path), after.get(path)
        name = f"region {path!r}"
        if left is None or right is None:
            one, which = (right, "second") if left is None else (left, "first")
            assert one is not None
            yield f"{name}: in the {which} plan alone, keeps {kept_text(one.kept)}"
            continue
        if left.operators != right.operators:
            yield f"{name}: {left.operators} operators -> {right.operators} operators"
        for mine, others, which in (
            (left.kept, right.kept, "first"),
            (right.kept, left.kept, "second"),
        ):
            alone = [kept for kept in mine if kept not in others]
            if alone:
                outputs = ", ".join(map(_output, alone))
                yield f"{name}: the {which} alone keeps {outputs}"


def _bytes(size: int) -> str:
    """Return a size, which may be negative, in a column."""
    text = format_bytes(abs(size))
    return f"{'-' + text if size < 0 else text:>12}"
