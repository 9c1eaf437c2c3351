"""What a loop keeps of its past is bounded, and what it forgot is found out again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.loop import plans, point, regions
from tests.loop.training import counted, live_bytes

ROWS = [512, 128, 256, 640, 256, 128]


def trained(around: Any, rows: list[int]) -> tuple[list[Tensor], int, Any]:
    """Train on batches of some rows; return gradients, the peak, and the context."""
    torch.manual_seed(0)
    layers = (m for _ in range(5) for m in (nn.Linear(32, 32), nn.GELU()))
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    with counted() as seen, around(model) as fitted:
        for many in rows:
            model(torch.randn(many, 32)).square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, seen.most_bytes, fitted


def held(rows: list[int]) -> Any:
    """Train plainly and under a budget; compare bits, and bytes with the budget."""
    before = live_bytes()
    plain, plain_bytes, _ = trained(lambda _: nullcontext(), rows)
    limit = before + int(0.75 * (plain_bytes - before))
    found, peak_bytes, fitted = trained(lambda model: mb.budget(model, limit), rows)
    assert all(map(torch.equal, plain, found))
    assert peak_bytes <= limit
    return fitted


def recorded(fitted: Any) -> int:
    (root,) = fitted._roots
    return sum(len(kind.recordings) for kind in root.plans.kinds.values())


def with_planners(fitted: Any) -> int:
    (root,) = fitted._roots
    kinds = root.plans.kinds.values()
    return sum(bool(p._planners) for kind in kinds for p in kind.points.values())


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loops keep next to nothing."""
    monkeypatch.setattr(plans, "MOST_RECORDED", 2)
    monkeypatch.setattr(plans, "MOST_PLANNERS", 1)
    monkeypatch.setattr(point, "MOST_KNOWN", 1)
    monkeypatch.setattr(point, "MOST_FOUND", 1)
    monkeypatch.setattr(regions, "MOST_SETS", 1)


@pytest.mark.usefixtures("bounded")
def test_a_loop_that_forgets_keeps_its_bits_and_its_budget():
    fitted = held(ROWS)
    assert 0 < recorded(fitted) <= 2
    assert with_planners(fitted) <= 1
    assert sum(s.uses for s in fitted.status().situations) == len(ROWS)


def test_regions_that_are_forgotten_still_count(monkeypatch):
    kept = held(ROWS).status().regions
    monkeypatch.setattr(regions, "MOST_SETS", 1)
    fitted = held(ROWS)
    assert len(fitted._roots[0].sets._sets) == 1
    assert fitted.status().regions == kept


def test_sizes_that_come_often_use_plans_of_others_where_no_more_are_kept(monkeypatch):
    monkeypatch.setattr(plans, "OWN_PLAN_USES", 2)
    rows = [512, 512, 128, *[256] * 3]
    assert recorded(held(rows)) == 4
    monkeypatch.setattr(plans, "MOST_RECORDED", 3)
    assert recorded(held(rows)) == 3


def test_the_rarest_situation_is_forgotten(monkeypatch):
    monkeypatch.setattr(plans, "MOST_SITUATIONS", 2)
    found = [
        (s.tensors, s.uses) for s in held([512] * 3 + [128, 256]).status().situations
    ]
    assert found == [("512x32", 2), ("256x32", 1)]


def test_what_a_loop_has_not_forgotten_is_saved(monkeypatch):
    monkeypatch.setattr(plans, "MOST_RECORDED", 1)
    (loop,) = held([512, 512, 128]).plan.loops
    assert [s.tensors for s in loop.situations] == ["512x32", "128x32"]


def test_a_plan_that_held_is_not_refused_because_another_plan_took_more():
    """A larger plan takes more than was expected of it, and then has no room."""
    wide = (m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU()))
    model, ballast_bytes = nn.Sequential(nn.Linear(64, 256), *wide), 32 << 20
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(limit: int, batches: list[tuple[bool, int]]) -> None:
        with counted(), mb.budget(model, limit + ballast_bytes):
            for is_tight, beside_bytes in batches:
                ballast = torch.empty(ballast_bytes * is_tight, dtype=torch.uint8)
                outputs = model(torch.randn(512, 64))
                # In the backward pass, so that it is no part of the tail.
                outputs.register_hook(partial(_allocate, beside_bytes))
                outputs.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                del outputs, ballast

    with pytest.raises(mb.BudgetError, match="Smallest feasible budget") as caught:
        run(100_000, [(True, 0)])
    limit = int(1.1 * (caught.value.least_bytes - ballast_bytes))
    del caught  # Its traceback holds the model.
    run(limit, [(False, 0), (True, 0), (False, 4 << 20), (True, 0)])


def _allocate(number_bytes: int, gradient: Tensor) -> None:
    torch.empty(number_bytes, dtype=torch.uint8)
