"""Text reports of plans: one plan, and the differences between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from membudget.planner.plan import (
    HostPlan,
    KeptOutput,
    Plan,
    RegionPlan,
    parameter_differences,
)
from membudget.report import rendered
from membudget.report.loop_text import loop_differences
from membudget.text import format_bytes

MOST_NUMBERS = 8
"""How many numbers of one operator a report shows; the plan has them all."""

PLAIN_FITS = "the plain step fits: no region is needed"


def described(plan: Plan) -> str:
    """Describe a plan's predictions and the outputs that each of its regions keeps."""
    if not plan.regions:
        return f"{head(plan)}\n\n{PLAIN_FITS}"
    titles = ["region", "operators", "keeps"]
    moves = any(region.offloaded for region in plan.regions)
    titles += ["moves to the host"] * moves
    rows = [
        (_name(region), str(region.operators), kept_text(region.kept))
        + (kept_text(region.offloaded),) * moves
        for region in plan.regions
    ]
    return f"{head(plan)}\n\n{rendered(titles, rows, left=len(titles))}"


def _name(region: RegionPlan) -> str:
    """Return a region's module, with its calls if the region is for some of several."""
    if not region.numbers:
        return region.path or "(the model)"
    pairs = enumerate(region.numbers)
    runs = [[n for _, n in of] for _, of in groupby(pairs, key=lambda p: p[1] - p[0])]
    texts = (str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)
    return f"{region.path}, calls {', '.join(texts)} of {region.times}"


def head(
    plan: Plan, measured_bytes: int | None = None, profile_bytes: int | None = None
) -> str:
    """Format a plan's predictions, with the measured peak if given.

    Where the profile counts other bytes than the plain step takes, it says so.

    Example:
        >>> plan = Plan("GPT", (), 2048, 4096, 2000, 1.25, 1.01, "cpu", ())
        >>> print(head(plan, 1990))
        GPT: 0 regions, times cpu
        budget         2.0 KiB  above what is in use before the step
        plain          4.0 KiB  peak of the plain step
        predicted      2.0 KiB  peak under the plan
        measured       1.9 KiB  0.9950 of the predicted, 97.2% of the budget
        slowdown         1.250  predicted; no schedule is below 1.010
    """
    count = len({region.path for region in plan.regions})
    lines = [
        f"{plan.model}: {count} region{'' if count == 1 else 's'}, times {plan.cost}",
        f"budget    {_bytes(plan.budget_bytes)}  above what is in use before the step",
        f"plain     {_bytes(plan.plain_peak_bytes)}  peak of the plain step"
        f"{_unlike(plan.plain_peak_bytes, profile_bytes)}",
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
        f"{plan.bound:.3f}{' that moves nothing' * bool(plan.host.moved_bytes)}"
    )
    if plan.host.moved_bytes:
        lines += _moves(plan.host)
    return "\n".join(lines)


def _moves(host: HostPlan) -> list[str]:
    """Return what a plan takes of the host.

    Example:
        >>> for line in _moves(HostPlan(4096, 512, 3072, 0.0125, 0.0005)):
        ...     print(line)
        moves          3.0 KiB  to the host and back; 4.0 KiB are allocated there
        link           12.5 ms  busy, the device waits 0.5 ms; window 512 B
    """
    return [
        f"moves     {_bytes(host.moved_bytes)}  to the host and back; "
        f"{format_bytes(host.host_bytes)} are allocated there",
        f"link      {1e3 * host.link_s:9.1f} ms  busy, the device waits "
        f"{1e3 * host.wait_s:.1f} ms; window {format_bytes(host.window_bytes)}",
    ]


def _unlike(plain_bytes: int, profile_bytes: int | None) -> str:
    if profile_bytes in (None, 0, plain_bytes):
        return ""
    ratio = plain_bytes / profile_bytes
    return f", measured: {ratio:.4f} of its profile; predictions are corrected"


def kept_text(kept: Iterable[KeptOutput]) -> str:
    """Return the names and numbers of the operators whose outputs are kept.

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
        texts.append(
            " ".join([name, *(f"#{number}" for number in found[:MOST_NUMBERS])])
        )
        if found[MOST_NUMBERS:]:
            texts[-1] += f" and {len(found) - MOST_NUMBERS} more"
    return ", ".join(texts) or "nothing"


def short_name(operator: str) -> str:
    """Return an operator's name without `aten.` and `.default`.

    Example:
        >>> short_name("aten.addmm.default"), short_name("aten.add.Tensor")
        ('addmm', 'add.Tensor')
    """
    return operator.removeprefix("aten.").removesuffix(".default")


def differences(first: Plan, second: Plan) -> list[str]:
    """Return one line for each difference between two plans.

    Example:
        >>> import dataclasses
        >>> plan = Plan("GPT", (), 1024, 4096, 1000, 1.25, 1.0, "cpu", ())
        >>> differences(plan, dataclasses.replace(plan, budget_bytes=2048))
        ['budget: 1.0 KiB (1,024 bytes) -> 2.0 KiB (2,048 bytes)']
        >>> differences(plan, plan)
        []
    """
    found = [*_models(first, second), *_predictions(first, second)]
    found += _regions(first.regions, second.regions)
    found += loop_differences(first.loops, second.loops)
    if not found and first != second:
        found.append("the regions are in another order, or one is listed twice")
    return found


def _models(first: Plan, second: Plan) -> Iterator[str]:
    if first.model != second.model:
        yield f"model: {first.model} -> {second.model}"
    for line in parameter_differences(first.parameters, second.parameters):
        yield f"parameters: {line}"


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
    """Format one kept output, such as `max #3 (output 1)`."""
    which = f" (output {kept.output})" if kept.output else ""
    return f"{short_name(kept.operator)} #{kept.number}{which}"


def _regions(
    first: Iterable[RegionPlan], second: Iterable[RegionPlan]
) -> Iterator[str]:
    before, after = ({_name(r): r for r in regions} for regions in (first, second))
    for key in dict.fromkeys([*before, *after]):
        left, right = before.get(key), after.get(key)
        name = f"region {key!r}"
        if left is None or right is None:
            one, which = (right, "second") if left is None else (left, "first")
            assert one is not None
            yield f"{name}: only in the {which} plan, keeps {kept_text(one.kept)}"
            continue
        if left.engine != right.engine:
            yield f"{name}: {left.engine} -> {right.engine}"
        if left.operators != right.operators:
            yield f"{name}: {left.operators} operators -> {right.operators} operators"
        for mine, others, which, does in (
            (left.kept, right.kept, "first", "keeps"),
            (right.kept, left.kept, "second", "keeps"),
            (left.offloaded, right.offloaded, "first", "moves"),
            (right.offloaded, left.offloaded, "second", "moves"),
        ):
            alone = [kept for kept in mine if kept not in others]
            if alone:
                outputs = ", ".join(map(_output, alone))
                yield f"{name}: only the {which} {does} {outputs}"


def _bytes(size: int) -> str:
    """Format a size, possibly negative, right-aligned to a fixed width."""
    text = format_bytes(abs(size))
    return f"{'-' + text if size < 0 else text:>12}"
