"""What the tests of the audit share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from membudget.audit import AuditReport, audit


def names(report: AuditReport, kind: str) -> list[str]:
    """Return the names of the differences of one kind."""
    return [item.name for item in report.differences if item.kind == kind]


def run_backward(forward: Callable[[], Tensor]) -> Tensor:
    """Run a step whose forward is given."""
    output = forward()
    output.square().sum().backward()
    return output


def audit_torch(model: nn.Module, x: Tensor) -> AuditReport:
    """Audit a region of `torch.utils.checkpoint` around `model`."""
    return audit(
        run_backward,
        plain=partial(model, x),
        budgeted=partial(torch_checkpoint, model, x, use_reentrant=False),
        modules=model,
    )
