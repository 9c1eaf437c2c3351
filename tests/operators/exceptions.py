"""What the tables leave out, each with the torch issue that explains it.

The proofs stand in `test_exceptions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.oracles import tensors_in
from tests.zoo import Call, Case


@dataclass(frozen=True)
class LeftOut:
    """Calls of an operator that are not tried.

    Attributes:
        operator: The operator.
        why: What torch does there.
        issue: Where torch's own tracker has it; empty where it has not.
        concerns: Tells whether a call is one of those.
    """

    operator: str
    why: str
    issue: str
    concerns: Callable[[Call], bool]


def _has_no_rows(call: Call) -> bool:
    return any(0 in tensor.shape for _, tensor in tensors_in(call.args))


def _is_in_eval_mode(call: Call) -> bool:
    return not call.kwargs.get("training", False)


def _pivots(call: Call) -> bool:
    return call.kwargs.get("driver", "gelsy") in ("gelsy", None)


LEFT_OUT = (
    LeftOut(
        "nn.MultiMarginLoss",
        "its mean over no rows is memory that nobody fills",
        "",
        _has_no_rows,
    ),
    LeftOut(
        "nn.functional.pdist",
        "its backward divides by the number of rows, and zero kills the process",
        "https://github.com/pytorch/pytorch/issues/197099",
        _has_no_rows,
    ),
    LeftOut(
        "nn.functional.rrelu",
        "it saves memory that nobody fills, and that its backward does not read",
        "https://github.com/pytorch/pytorch/issues/193671",
        _is_in_eval_mode,
    ),
    *(
        LeftOut(
            operator,
            "its default driver reads pivots from memory that nobody fills",
            "https://github.com/pytorch/pytorch/issues/71222",
            _pivots,
        )
        for operator in ("linalg.lstsq", "linalg.lstsq.grad_oriented")
    ),
)


def is_tried(operator: str, variant: Case) -> bool:
    """Return whether a variant of an operator is compared with plain."""
    reasons = [left for left in LEFT_OUT if left.operator == operator]
    return not any(left.concerns(variant.build()) for left in reasons)
