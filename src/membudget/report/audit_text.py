"""The text of an audit: one screen, the verdict first."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from membudget.audit.differences import Difference
    from membudget.audit.verdict import AuditReport, Compared

MAX_DIFFERENCES = 12
"""How many differences each list shows; `AuditReport` has them all."""

_MAX_NAMES = 6

_NOUNS = {
    "losses": ("loss", "losses"),
    "no_gradients": ("missing gradient", "missing gradients"),
    "attributes": ("tensor attribute", "tensor attributes"),
    "streams": ("random stream", "random streams"),
}


def audit_text(report: AuditReport) -> str:
    """Return the verdict, what was compared, the warnings and the differences."""
    lines = [f"audit: {_verdict(report)}", f"  compared  {report.compared}"]
    if report.loss_from:
        lines.append(f"  loss      {report.loss}, {report.loss_from}")
    lines.append(f"  regions   {_regions(report)}")
    lines += [f"  warning   {warning}" for warning in report.warnings]
    lines += _section("differences, plain beside budgeted:", report.differences)
    lines += _section("differences between two plain runs:", report.unrepeatable)
    lines += _section("Python values that differ:", report.side_effects)
    return "\n".join(lines)


def counts_text(compared: Compared) -> str:
    """Return the counts that are not zero, such as `1 loss, 2 gradients`."""
    phrases = []
    for name, count in asdict(compared).items():
        one, many = _NOUNS.get(name, (name.removesuffix("s"), name))
        if count:
            phrases.append(f"{count:,} {one if count == 1 else many}")
    return ", ".join(phrases)


def _verdict(report: AuditReport) -> str:
    count = len(report.differences)
    if not count:
        return "equal to the last bit"
    return f"NOT equal: {count:,} difference{'' if count == 1 else 's'}"


def _regions(report: AuditReport) -> str:
    if report.regions is None:
        return "not counted, the step calls them itself"
    idle = [region.name for region in report.regions if not region.forwards]
    uneven = [
        f"{region.name} ({region.recomputes})"
        for region in report.regions
        if region.recomputes != region.forwards
    ]
    text = f"{report.regions_ran} of {len(report.regions)} ran"
    text += _in_brackets("without", idle) + f", {report.recomputes} recomputes"
    return text + _in_brackets("not once a forward:", uneven)


def _in_brackets(word: str, names: list[str]) -> str:
    if not names:
        return ""
    more = ", ..." if names[_MAX_NAMES:] else ""
    return f" ({word} {', '.join(names[:_MAX_NAMES])}{more})"


def _section(title: str, differences: tuple[Difference, ...]) -> list[str]:
    """Return a titled list of the first differences; nothing if there are none."""
    if not differences:
        return []
    shown = differences[:MAX_DIFFERENCES]
    kind_width = max(len(item.kind) for item in shown)
    name_width = min(40, max(len(item.name) for item in shown))
    lines = [title] + [
        f"  {item.kind:{kind_width}}  {item.name:{name_width}}  {item.detail}"
        for item in shown
    ]
    if len(differences) > len(shown):
        lines.append(f"  and {len(differences) - len(shown):,} more")
    return lines
