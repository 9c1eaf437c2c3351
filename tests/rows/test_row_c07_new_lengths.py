"""Row C7: a new length between known ones is neither recorded nor planned anew."""

from __future__ import annotations

from membudget.profile import profile_step
from tests.loop.training import check_held


def test_sizes_between_recorded_ones_are_not_recorded(monkeypatch):
    recorded = []
    real = profile_step

    def noted(step, *args, **kwargs):
        recorded.append(tuple(step.args[0].shape))
        return real(step, *args, **kwargs)

    monkeypatch.setattr("membudget.loop.call_recorder.profile_step", noted)
    check_held([16, 64, 32, 40, 48, 24, 56, 20], 0.6)
    assert recorded == [(8, 16), (8, 64)]
