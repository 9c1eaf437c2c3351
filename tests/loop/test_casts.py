"""What autocast caches lives beside a plan that drops it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.loop.casts import CachedCasts
from membudget.loop.kind import CallKind, Tail
from membudget.loop.micro_batch import MicroBatchStep, RecordedBatch
from membudget.policies import _PlannedCall
from membudget.profile import profile_step
from membudget.state.autocast import casts_kept
from tests.loops.models import Language, Mixed, Recurrent, inputs_of, loss_of

SIZES = (4, 16)


def autocast() -> torch.autocast:
    return torch.autocast(torch.get_default_device().type, torch.bfloat16)


def recorded(model: Language) -> RecordedBatch:
    with autocast():
        step = MicroBatchStep(model, (torch.randint(64, SIZES),), {})
        names = CachedCasts(model).names()
        with casts_kept():
            return RecordedBatch(profile_step(step, fake=True), names)


def cast_bytes(model: Language) -> int:
    """Return the bytes of what linear layers read in lower precision."""
    linear = (m for m in model.modules() if isinstance(m, torch.nn.Linear))
    parameters = (p for module in linear for p in module.parameters())
    return sum(p.nbytes // 2 for p in parameters if p.requires_grad)


def beside_bytes(kind: CallKind) -> int:
    return kind.nothing_kept(kind.points[SIZES]).beside_bytes


def test_casts_count_until_a_backward_pass_begins_outside_of_autocast():
    model, kind = Language(), CallKind(Tail())
    recording = kind.add(SIZES, recorded(model)).recording
    at_first = beside_bytes(kind)
    kind.tail.learn(recording, 0, holds_casts=False)
    assert at_first - beside_bytes(kind) == cast_bytes(model)
    kind.tail.learn(recording, 0, holds_casts=True)
    kind.tail.learn(recording, 0, holds_casts=False)
    assert beside_bytes(kind) == at_first


def test_casts_of_frozen_parameters_are_not_cached():
    model = Language(rank=4)
    of = set(recorded(model).casts.values())
    assert len(of) == sum(p.requires_grad for p in model.parameters())


def test_no_casts_are_cached_outside_of_autocast_or_without_its_cache():
    model = Language()
    assert not CachedCasts(model).names()
    with autocast(), casts_kept():
        assert not CachedCasts(model).names()
    with autocast():
        assert len(CachedCasts(model).names()) == len(list(model.parameters()))


def test_what_an_earlier_forward_has_cached_is_told():
    model = Language()
    casts = CachedCasts(model)

    def are_there(is_awaited: bool) -> bool:
        casts.clear(is_awaited, 2)
        return casts.are_there

    assert not are_there(True)
    for _ in range(2):
        with autocast():
            assert [are_there(w) for w in (False, True, True)] == [False, True, True]
            assert not are_there(False)  # They were dropped.
    with autocast(), casts_kept():
        assert not any(are_there(True) for _ in range(2))


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("make", [Recurrent, Mixed])
def test_plans_are_followed_where_casts_are_cached(make, together, monkeypatch):
    """A cell casts its weights in its first call, two forwards in the first one."""
    differences: list[Any] = []
    monkeypatch.setattr(_PlannedCall, "_count", differences.append)
    name = make.__name__.lower()
    torch.manual_seed(0)
    model = make()
    budget = mb.budget(model, "60%", on_exceed="warn")
    with warnings.catch_warnings(), budget as fitted:
        warnings.simplefilter("ignore", mb.BudgetWarning)
        for _ in range(3):
            with autocast():
                batches = [inputs_of(name, model, 12) for _ in range(together)]
                losses = [loss_of(model(x), y) for x, y in batches]
                torch.stack(losses).sum().backward()
    assert not differences
    assert any(region.kept for region in fitted.plan.regions)


def test_a_gradient_that_is_the_sum_of_three_is_added_in_the_plain_order():
    def weights(limit: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Language(tied=True)
        budget = mb.budget(model, limit or "100%", on_exceed="warn")
        if limit:
            budget.start()
        with autocast():  # Casts are cached once for all backward passes.
            for _ in range(3):
                one, other = torch.randint(64, (2, *SIZES))
                loss = loss_of(model(one), one) + loss_of(model(other), other)
                loss.backward()
        budget.stop()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = weights(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mb.BudgetWarning)
        found = weights("90%")
    assert all(map(torch.equal, plain, found))
