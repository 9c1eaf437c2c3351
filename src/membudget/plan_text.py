"""Plans as a person reads them: one plan, or what differs between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from membudget.planner.plan import KeptOutput, Plan, PlannedRegion
from membudget.sizes import format_bytes
from membudget.tables import rendered

MOST = 8
"""How many numbers of one operator a report shows; the plan holds them all."""


def described(plan: Plan) -> str:
    """Return what a plan predicts, and what each of its regions keeps."""
    count = len(plan.regions)
    lines = [
        f"{plan.model}: {count} region{'' if count == 1 else 's'}, seconds {plan.cost}",
        f"budget   {_bytes(plan.budget_bytes)}  above what is there before the step",
        f"plain    {_bytes(plan.plain_peak_bytes)}  peak of the plain step",
        f"planned  {_bytes(plan.peak_bytes)}  predicted peak",
        f"slowdown {plan.slowdown:12.3f}  predicted; no schedule is below "
        f"{plan.bound:.3f}",
        "",
    ]
    if not count:
        return "\n".join([*lines, "the plain step fits: no region is needed"])
    rows = [
        (region.path or "(the model)", str(region.operators), kept_text(region.kept))
        for region in plan.regions
    ]
    return "\n".join([*lines, rendered(("region", "operators", "keeps"), rows, left=3)])


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
        of_name = numbers.setdefault(_short(output.operator), [])
        if output.number not in of_name:
            of_name.append(output.number)
    texts = []
    for name, found in numbers.items():
        texts.append(" ".join([name, *(f"#{number}" for number in found[:MOST])]))
        if found[MOST:]:
            texts[-1] += f" and {len(found) - MOST} more"
    return ", ".join(texts) or "nothing"


def _short(operator: str) -> str:
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
    return f"{_short(kept.operator)} #{kept.number}{which}"


def _regions(
    first: Iterable[PlannedRegion], second: Iterable[PlannedRegion]
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
