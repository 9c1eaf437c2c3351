"""What a run learned of its loop is written, and the next run begins with it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import BudgetWarning, OptionError, PlanError
from membudget.loop import call_recorder
from membudget.loop.kind import CallKind
from membudget.planner.loop_plan import pack, unpack
from membudget.state import description
from tests.loop.training import check_held, outcome, tokens, train
from tests.loops.models import Images, Language


def saved(path: Path, lengths: list[int], budget: int | str = "60%", **options: Any):
    """Train under a budget, and save what was learned."""
    _, _, fitted = outcome(lambda model: mb.budget(model, budget), lengths, **options)
    fitted.save(path)
    return fitted.status()  # The model need not live on.


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("what is known is not found out again")


def test_known_situations_are_planned_from_the_first_micro_batch_on(tmp_path):
    path, lengths = tmp_path / "plan.json", [48, 24, 48, 24, 48]
    plain, plain_bytes, _ = outcome(lambda _: nullcontext(), lengths)
    limit = int(0.7 * plain_bytes)
    first = saved(path, lengths, limit)
    with (
        patch.object(call_recorder, "profile_step", forbidden),
        patch.object(CallKind, "nothing_kept", forbidden),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", BudgetWarning)
        found, peak_bytes, fitted = outcome(
            lambda model: mb.budget(model, limit, plan=path), lengths
        )
    assert all(map(torch.equal, plain, found))
    assert peak_bytes <= limit
    situations = fitted.status().situations
    assert [s.uses for s in situations] == [3, 2]
    before = {s.tensors: s.slowdown for s in first.situations}
    assert {s.tensors: s.slowdown for s in situations} == before


def test_a_plan_that_is_known_and_fits_is_not_made_again(tmp_path):
    path = tmp_path / "plan.json"
    first = saved(path, [48] * 4)
    with patch.object(CallKind, "fastest", forbidden):
        _, _, fitted = outcome(
            lambda model: mb.budget(model, "60%", plan=path), [48] * 2
        )
    (status,) = fitted.status().situations
    assert status.plans == 0
    assert 1.0 < status.slowdown == first.situations[0].slowdown


def test_another_budget_makes_another_plan_of_the_same_recording(tmp_path):
    path = tmp_path / "plan.json"
    saved(path, [48] * 3, "90%")
    with patch.object(call_recorder, "profile_step", forbidden):
        _, _, fitted = outcome(
            lambda model: mb.budget(model, "50%", plan=path), [48] * 3
        )
    (status,) = fitted.status().situations
    assert status.plans
    assert 0 < status.worst_bytes <= status.left_bytes


def test_a_situation_that_is_not_in_the_file_is_recorded(tmp_path):
    path = tmp_path / "plan.json"
    saved(path, [24] * 3)
    plain, _, _ = outcome(lambda _: nullcontext(), [24, 40, 24])
    found, _, fitted = outcome(
        lambda model: mb.budget(model, "60%", plan=path), [24, 40, 24]
    )
    assert all(map(torch.equal, plain, found))
    assert [s.tensors for s in fitted.status().situations] == ["8x24", "8x40"]


def test_what_does_not_come_in_a_run_is_handed_on(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    lengths = [16, 32, 48]
    saved(first, lengths * 3)
    _, _, fitted = outcome(lambda model: mb.budget(model, "60%", plan=first), [32] * 2)
    fitted.save(second)
    one, other = (mb.Plan.from_json(path).loops[0] for path in (first, second))
    assert {s.tensors for s in one.situations} == {"8x16", "8x32", "8x48"}
    assert {s.tensors for s in other.situations} == {"8x16", "8x32", "8x48"}
    with patch.object(call_recorder, "profile_step", forbidden):
        outcome(lambda model: mb.budget(model, "60%", plan=second), lengths)


def test_gradients_that_are_there_are_another_situation_of_the_file(tmp_path):
    path = tmp_path / "plan.json"
    saved(path, [32] * 4, accumulation=2)
    with patch.object(call_recorder, "profile_step", forbidden):
        _, _, fitted = outcome(
            lambda model: mb.budget(model, "60%", plan=path), [32] * 4, accumulation=2
        )
    assert len(fitted.status().situations) == 2


def test_the_file_of_a_loop_is_a_plan_that_apply_takes(tmp_path):
    path = tmp_path / "plan.json"
    saved(path, [48, 48, 48, 24])
    plan = mb.Plan.from_json(path)
    assert plan.regions
    assert [s.tensors for s in plan.loops[0].situations] == ["8x48", "8x24"]
    model = Language()
    applied = mb.apply(model, path)
    train(model, [48])
    assert sum(region.forwards for region in applied.status().regions)
    assert not sum(region.differences for region in applied.status().regions)


def test_two_models_of_a_loop_share_a_file(tmp_path):
    path = tmp_path / "plan.json"

    def run(plan: Path | None) -> Any:
        torch.manual_seed(0)
        models = [Language(), Images()]
        batches = [tokens(24), torch.randn(4, 3, 12, 12)]
        with mb.budget(models, "80%", plan=plan) as fitted:
            for model, batch in [*zip(models, batches, strict=True)] * 2:
                model(batch).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()
        return fitted

    run(None).save(path)
    with patch.object(call_recorder, "profile_step", forbidden):
        fitted = run(path)
    assert {s.model for s in fitted.status().situations} == {"Language", "Images"}
    with pytest.raises(PlanError, match=r"saved for 2 models \(Language, Images\)"):
        mb.budget(Language(), "80%", plan=path)


class Wider(Language):
    """Has another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_plan_for_another_model_is_refused_before_the_loop(tmp_path):
    path = tmp_path / "plan.json"
    saved(path, [16] * 2)
    with pytest.raises(PlanError, match=r"scale, float32\[3\], is only in the second"):
        mb.budget(Wider(), "60%", plan=path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("torch", "1.0", "saved under torch 1.0, and this is 2"),
        ("device", "cuda", "saved on cuda, and this is cpu"),
        ("learned", "", "learned is not whole"),
        ("learned", "x" * 64, "learned is not whole"),
        ("learned", pack({"tail": 3}), "learned is not whole"),
    ],
)
def test_a_file_that_does_not_serve_is_refused_before_the_loop(
    tmp_path, field, value, words
):
    path = tmp_path / "plan.json"
    saved(path, [16] * 2)
    data = json.loads(path.read_text())
    data["loops"][0][field] = value
    with pytest.raises(PlanError, match=words):
        mb.budget(Language(), "60%", plan=mb.Plan.from_dict(data))


def test_a_damaged_recording_is_a_plan_error(tmp_path):
    path = tmp_path / "plan.json"
    saved(path, [16] * 2)
    data = json.loads(path.read_text())
    learned = unpack(data["loops"][0]["learned"])
    for kind in learned["kinds"].values():
        kind["recorded"][0]["profile"]["graph"].pop("operators")
    data["loops"][0]["learned"] = pack(learned)
    model = Language()
    with (
        mb.budget(model, "60%", plan=mb.Plan.from_dict(data)),
        pytest.raises(PlanError, match="learned is not whole"),
    ):
        model(tokens(16))


def test_the_plan_of_a_single_step_says_nothing_of_a_loop():
    model = Language()
    fitted = mb.fit(model, tokens(16), "90%", measure="none")
    fitted.remove()
    with pytest.raises(PlanError, match="the plan is of a single step"):
        mb.budget(model, "60%", plan=fitted.plan)


def activated(by: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    class Activated(Language):
        def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
            return by(super().forward(tokens, *args, **kwargs))

    return Activated


def test_a_plan_for_other_code_is_left_aside_with_a_warning(tmp_path):
    path = tmp_path / "plan.json"
    saved(path, [16] * 2, make=activated(torch.tanh))
    torch.manual_seed(0)
    model = activated(torch.sigmoid)()
    with (
        pytest.warns(
            BudgetWarning, match="the saved plan is ignored, and every situation is"
        ),
        mb.budget(model, "60%", plan=path) as fitted,
    ):
        train(model, [16])
    (status,) = fitted.status().situations
    assert status.plans


def test_another_optimizer_s_state_is_not_taken_from_the_file(tmp_path):
    path, model = tmp_path / "plan.json", Language()
    saved(path, [16] * 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.warns(BudgetWarning, match="another optimizer"),
        mb.budget(model, "60%", optimizer=optimizer, plan=path),
    ):
        pass


def test_nothing_is_saved_where_nothing_was_planned(tmp_path):
    fitted = mb.budget(Language(), "60%")
    with pytest.raises(OptionError, match="no plan to save: the budget was never open"):
        fitted.save(tmp_path / "plan.json")
    with fitted, pytest.raises(OptionError, match="no micro-batch was planned"):
        fitted.save(tmp_path / "plan.json")
    assert not [*tmp_path.iterdir()]


def test_a_model_that_cannot_be_described_trains_and_has_no_plan_to_save(monkeypatch):
    monkeypatch.setattr(description, "MOST_OBJECTS", 10)
    model = Language()
    with mb.budget(model, "60%") as fitted:
        train(model, [16])
        with pytest.raises(OptionError, match="no plan to save: it leads to more than"):
            _ = fitted.plan
    assert [s.uses for s in fitted.status().situations] == [1]


def test_a_file_may_be_saved_in_the_loop(tmp_path):
    path, model = tmp_path / "plan.json", Language()
    with mb.budget(model, "60%") as fitted:
        train(model, [16])
        fitted.save(path)
        train(model, [16, 24])
    assert len(mb.Plan.from_json(path).loops[0].situations) == 1


def test_bits_and_bytes_are_held_from_the_file(tmp_path):
    path = tmp_path / "plan.json"
    lengths = [48, 16, 32, 48]
    check_held(lengths, 0.6).save(path)
    plain, plain_bytes, _ = outcome(lambda _: nullcontext(), lengths)
    limit = int(0.6 * plain_bytes)
    found, peak_bytes, _ = outcome(
        lambda model: mb.budget(model, limit, plan=path), lengths
    )
    assert all(map(torch.equal, plain, found))
    assert peak_bytes <= limit
