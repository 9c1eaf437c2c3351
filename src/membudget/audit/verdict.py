"""The report of an audit, and its text: one screen with the verdict first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from membudget.apply import RegionStatus
from membudget.audit.differences import Difference


@dataclass(frozen=True)
class Compared:
    """The number of objects of each kind that an audit compared.

    Attributes:
        losses: Number of losses: 1, or 0 for a user-defined step.
        outputs: Number of tensors that the step returned.
        gradients: Number of gradients that the plain step computed.
        no_gradients: Number of tensors that require a gradient and received none.
        parameters: Number of parameters.
        buffers: Number of buffers.
        attributes: Number of unregistered tensors in modules or in the batch.
        streams: Number of random number generators.
    """

    losses: int = 0
    outputs: int = 0
    gradients: int = 0
    no_gradients: int = 0
    parameters: int = 0
    buffers: int = 0
    attributes: int = 0
    streams: int = 0

    def __str__(self) -> str:
        """Return the counts that are not zero, as one phrase."""
        phrases = []
        for name, count in asdict(self).items():
            one, many = _NOUNS.get(name, (name.removesuffix("s"), name))
            if count:
                phrases.append(f"{count:,} {one if count == 1 else many}")
        return ", ".join(phrases)


@dataclass(frozen=True)
class AuditReport:
    """The comparison of a plain step with the same step under regions.

    Attributes:
        differences: Bitwise differences between the two steps in loss, outputs,
            gradients, parameters, buffers, tensor attributes and random number
            generators.
        side_effects: Python values (counters, lengths of lists) that differ because a
            recompute repeated the side effects of the code; `equal` ignores them.
        unrepeatable: Differences between two runs of the plain step.
        compared: Number of compared objects of each kind.
        regions: Forwards and recomputes of each region in the budgeted run; `None` if
            the step calls `checkpoint` itself, because such calls are not counted.
        loss_from: Short text on the source of the loss; empty for a user-defined step.
        loss: Loss of the plain step as text; empty for a user-defined step.
        zero_gradients: Whether every gradient of the plain step is zero, so that equal
            gradients prove little.
    """

    differences: tuple[Difference, ...]
    side_effects: tuple[Difference, ...] = ()
    unrepeatable: tuple[Difference, ...] = ()
    compared: Compared = Compared()
    regions: tuple[RegionStatus, ...] | None = None
    loss_from: str = ""
    loss: str = ""
    zero_gradients: bool = False

    @property
    def equal(self) -> bool:
        """Whether the budgeted step equals the plain step bit for bit."""
        return not self.differences

    @property
    def repeatable(self) -> bool:
        """Whether two plain runs agree; if not, the audit proves nothing."""
        return not self.unrepeatable

    @property
    def regions_ran(self) -> int | None:
        """Number of regions that ran; `None` if regions were not counted."""
        if self.regions is None:
            return None
        return sum(region.forwards > 0 for region in self.regions)

    @property
    def recomputes(self) -> int | None:
        """Total recomputes of all regions; `None` if regions were not counted."""
        if self.regions is None:
            return None
        return sum(region.recomputes for region in self.regions)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons not to rely on `equal`, one sentence each."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if self.regions_ran == 0:
            yield "no region ran: the two steps are the same code"
        elif self.recomputes == 0:
            yield "no region was recomputed: the loss does not depend on one"
        if self.unrepeatable:
            yield (
                "the plain step is not repeatable, so a difference proves nothing "
                "about regions; it may depend on a clock, on global variables or on "
                "nondeterministic kernels "
                "(torch.use_deterministic_algorithms(True) helps)"
            )
        if not self.compared.gradients:
            yield "no gradient was compared: does the step call backward()?"
        elif self.zero_gradients:
            yield "every gradient is zero, so equality proves little"
        if self.side_effects:
            yield (
                f"{len(self.side_effects)} Python value(s) differ: code with side "
                f"effects ran again; guard it with `if not membudget.is_recomputing()`"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        return {
            "equal": self.equal,
            "repeatable": self.repeatable,
            "regions_ran": self.regions_ran,
            "recomputes": self.recomputes,
            "loss": self.loss,
            "loss_from": self.loss_from,
            "compared": asdict(self.compared),
            "regions": None
            if self.regions is None
            else list(map(asdict, self.regions)),
            "differences": [item.to_dict() for item in self.differences],
            "side_effects": [item.to_dict() for item in self.side_effects],
            "unrepeatable": [item.to_dict() for item in self.unrepeatable],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        """Return the report as one screen of text."""
        lines = [f"audit: {_verdict_text(self)}", f"  compared  {self.compared}"]
        if self.loss_from:
            lines.append(f"  loss      {self.loss}, {self.loss_from}")
        lines.append(f"  regions   {_regions(self)}")
        lines += [f"  warning   {warning}" for warning in self.warnings]
        lines += _section("differences, plain beside budgeted:", self.differences)
        lines += _section("differences between two plain runs:", self.unrepeatable)
        lines += _section("Python values that differ:", self.side_effects)
        return "\n".join(lines)


MAX_DIFFERENCES = 12
"""How many differences each list shows; `AuditReport` has them all."""

_MAX_NAMES = 6

_NOUNS = {
    "losses": ("loss", "losses"),
    "no_gradients": ("missing gradient", "missing gradients"),
    "attributes": ("tensor attribute", "tensor attributes"),
    "streams": ("random stream", "random streams"),
}


def _verdict_text(report: AuditReport) -> str:
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
    """Return a titled list of the first differences; empty if there are none."""
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
