"""What ranks measure before they plan; their plans are in row C12."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from membudget import one_plan
from membudget.one_plan import _quieter_run
from membudget.outcome import Metered, plain_run
from membudget.step import Step

THREADS_BYTES = 1 << 20


def test_what_threads_held_in_one_plain_run_is_not_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step(nn.Linear(8, 8), torch.ones(4, 8), lambda out, _: out.sum())
    quiet = plain_run(step)
    for noisy in (0, 1):
        extra = iter([THREADS_BYTES * (noisy == 0), THREADS_BYTES * (noisy == 1)])

        def run(step: Step, extra=extra) -> Metered:
            found = plain_run(step)
            return Metered(found.peak_bytes + next(extra), found.outcome)

        monkeypatch.setattr(one_plan, "plain_run", run)
        assert _quieter_run(step).peak_bytes == quiet.peak_bytes
