"""What the operator tables leave out is little, and torch is why."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.operators.database import differentiable_operators
from tests.operators.exceptions import LEFT_OUT


def test_at_most_one_operator_in_fifty_is_an_exception():
    excepted = {left.operator for left in LEFT_OUT}
    assert len(excepted) <= len(differentiable_operators()) / 50


@pytest.mark.slow
def test_the_distances_of_no_rows_kill_the_process_without_a_region():
    program = (
        "import torch; x = torch.rand(0, 3, requires_grad=True); "
        "torch.nn.functional.pdist(x).sum().backward()"
    )
    code = subprocess.call([sys.executable, "-c", program])
    assert code != 0, "torch is cured: try it in the table again"


def test_rrelu_saves_noise_that_it_does_not_fill_in_eval_mode():
    saved: list[Tensor] = []

    def note_and_overwrite(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.full((5,), -1.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note_and_overwrite, lambda t: t):
        y = F.rrelu(x, training=False)
    noise = next(t for t in saved if t.data_ptr() != x.data_ptr())
    noise.fill_(float("nan"))
    y.sum().backward()
    assert x.grad is not None
    assert not x.grad.isnan().any()


@pytest.mark.slow
def test_the_default_driver_of_lstsq_reads_what_other_tensors_left_in_memory():
    a, b = torch.eye(5), torch.ones(5, 1)
    a[0] = 0
    sums = set()
    for left in range(200):
        torch.full((5,), left % 3, dtype=torch.int32)
        sums.add(torch.linalg.lstsq(a, b).solution.sum().item())
    assert len(sums) > 1, "torch is cured: try it in the table again"


@pytest.mark.slow
def test_the_multi_margin_loss_of_no_rows_is_what_other_tensors_left_in_memory():
    x, target = torch.rand(0, 3), torch.zeros(0, dtype=torch.int64)
    sums = set()
    for left in range(200):
        torch.full((), float(left % 3))
        sums.add(F.multi_margin_loss(x, target).item())
    assert len(sums) > 1, "torch is cured: try it in the table again"
