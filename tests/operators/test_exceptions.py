"""What the operator tables leave out is little, and cannot be tried."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.operators.database import differentiable_operators
from tests.operators.exceptions import PLAIN_CRASHES, UNREPEATABLE

CRASHES = {
    ("nn.functional.pdist", "empty"): (
        "x = torch.rand(0, 3, requires_grad=True)",
        "torch.nn.functional.pdist(x).sum().backward()",
    ),
}


def test_at_most_one_operator_in_fifty_is_an_exception():
    excepted = {name for name, _ in PLAIN_CRASHES} | UNREPEATABLE.keys()
    assert len(excepted) <= len(differentiable_operators()) / 50


@pytest.mark.slow
@pytest.mark.parametrize("exception", PLAIN_CRASHES, ids=" ".join)
def test_what_is_said_to_kill_the_process_does_so_without_a_region(
    exception: tuple[str, str],
):
    program = "; ".join(["import torch", *CRASHES[exception]])
    code = subprocess.call([sys.executable, "-c", program])
    assert code < 0, "torch is cured: try it in the table again"
