"""Row C3: optimizer state counts, also if nobody passed the optimizer."""

from __future__ import annotations

import gc

import pytest
import torch

import membudget as mb
from tests.loop.training import check_held, train
from tests.loops.models import Language


def test_state_that_the_first_step_makes_counts_from_the_second_micro_batch_on():
    fitted = check_held([48] * 4, 0.7)
    before, after = fitted.status().situations[0], fitted.status().situations[-1]
    assert after.last_bytes <= after.left_bytes
    assert before.uses == 4


def test_a_first_step_whose_state_is_over_budget_is_refused_before_it_runs():
    gc.collect()
    model = Language()
    weights = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mb.budget(model, 1_000_000_000) as fitted:
        train(model, [16], optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    in_use = 1_000_000_000 - fitted.status().situations[0].left_bytes
    # Enough for a micro-batch with its gradients, too little for two moments beside.
    limit = in_use + int(2.3 * sum(p.nbytes for p in model.parameters()))
    with (
        mb.budget(model, limit),
        pytest.raises(mb.BudgetError, match="the next step of AdamW needs") as caught,
    ):
        train(model, [8], optimizer=optimizer)
    assert caught.value.least_bytes > limit
    holders = caught.value.holders
    assert sum(holder.bytes for holder in holders) == caught.value.least_bytes
    assert [holder.kind for holder in holders] == ["other", "optimizer step"]
    assert all(map(torch.equal, weights, model.parameters()))
    assert not optimizer.state
