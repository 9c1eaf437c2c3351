"""What the tests of operators and of modules check, and count."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.operators.compare import Comparison
from tests.operators.exceptions import is_tried
from tests.operators.ways import FEW_STEPS, FEW_WAYS, STEPS, WAYS
from tests.zoo import Case

LEAST_TRIPLES = 8

WHOLE_COMPARISON = Comparison(WAYS, STEPS, most_kept=3)
SHARE_COMPARISON = Comparison(FEW_WAYS, FEW_STEPS, most_kept=2)

as_they_come = [
    # Samples that warn do so under a region as without. A value that is kept instead
    # of replayed is a fault.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::membudget.errors.UnrepeatableWarning"),
]


def check(
    name: str,
    variants: Iterable[Case],
    comparison: Comparison,
    record_property: Callable[[str, object], None],
) -> None:
    """Compare every variant of an operator in every way with plain, and count."""
    found = comparison.of(v for v in variants if is_tried(name, v))
    record_property("triples", found.triples)
    assert found.triples >= LEAST_TRIPLES, "plain refuses nearly all of it"
    assert not found.differing, "\n".join(found.differing)
    assert not found.unrepeatable, found.unrepeatable
