"""Which regions an audit is about: chosen, already there, or called by the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.apply import RegionStatus
from membudget.attach import ModuleRegion, carried_by, has_region, statistics_of
from membudget.audit import audit
from membudget.audit.runs import RegionCounts, regions_for
from membudget.engine.options import checked_options


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def test_a_model_with_nothing_to_choose_from_is_rejected():
    with pytest.raises(mb.SelectionError, match="Linear has no ModuleList"):
        audit(nn.Linear(4, 4), torch.ones(1, 4))


def test_a_selection_is_that_of_apply():
    model = nn.Sequential(*(linear() for _ in range(5)))

    def audited(**selection: Any) -> list[str]:
        report = audit(model, torch.ones(1, 4), **selection)
        return [region.name for region in report.regions or ()]

    assert audited() == ["0", "1", "2", "3", "4"]
    assert audited(every=2) == ["0", "2", "4"]
    assert audited(names="[13]") == ["1", "3"]
    assert audited(blocks=nn.Linear, where=lambda name, _: name > "2") == ["3", "4"]


def test_a_wrong_selection_or_option_is_rejected_before_the_step_runs():
    model = nn.Sequential(linear())
    model.register_forward_hook(lambda *_: pytest.fail("the step ran"))

    with pytest.raises(mb.SelectionError, match="matches names=\\['nothing'\\]"):
        audit(model, torch.ones(1, 4), names="nothing")
    with pytest.raises(mb.OptionError, match="never"):
        audit(model, torch.ones(1, 4), determinism_check="never")


def test_a_selection_for_a_model_that_carries_regions_is_rejected():
    model = nn.Sequential(linear(), linear())
    mb.apply(model, names="0")

    with pytest.raises(mb.OptionError, match=r"carries regions already.*names, every"):
        audit(model, torch.ones(1, 4), names="1", every=2)


def test_regions_inside_the_model_are_plain_in_the_plain_run():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Tensor:
            return mb.checkpoint(lambda x: self.layer(x).tanh(), x)

    model: Any = nn.Sequential(Inner(), Inner())
    ran: list[bool] = []
    model[0].layer.register_forward_hook(lambda *_: ran.append(mb.is_recomputing()))

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()

    assert audit(plain=step, budgeted=step, modules=model).equal
    assert ran == [False, False, False, True]


def test_existing_regions_stay_and_their_counters_do_not_move():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    applied = mb.apply(model, blocks=nn.Linear)
    model(torch.randn(2, 4)).sum().backward()
    before = applied.status()

    report = audit(model, torch.randn(5, 4))

    assert report.equal
    assert report.regions_ran == 2
    assert [region.name for region in report.regions or ()] == ["0", "2"]
    assert applied.status() == before
    applied.remove()
    assert type(model[0]) is nn.Linear


def test_an_audit_of_regions_counts_only_its_own_steps():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    applied = mb.apply(model, names="0")
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    statistics = statistics_of(model[0])
    assert statistics is not None
    counts = RegionCounts([model, model[1]])
    assert [(r.name, r.forwards) for r in counts.since()] == [("0", 0)]
    model(torch.randn(2, 4)).sum().backward()
    with torch.no_grad():
        model[0](torch.randn(2, 4))
    model.requires_grad_(False)
    model(torch.randn(2, 4))
    assert counts.since() == (RegionStatus("0", 1, 1, 1),)
    counts.restore()
    assert (statistics.forwards, statistics.recomputes) == (2, 2)
    assert statistics.skipped == 0
    applied.remove()


def test_the_regions_of_an_audit_verify_nothing_unless_they_replay():
    model = nn.Sequential(linear(), nn.Tanh())

    def options(**selection: Any) -> Any:
        with regions_for(model, selection)():
            carried = carried_by(model[0])
        assert isinstance(carried, ModuleRegion)
        return carried.options.verify

    plain = checked_options({}).verify
    assert plain is not False
    assert options() is False
    assert options(engine="rerun") is False
    assert options(engine="replay") == plain
    assert options(keep=mb.policies.matmuls) == plain
    assert options(verify=True) is True
    assert not any(has_region(module) for module in model.modules())


def test_an_audit_says_in_which_run_a_step_failed():
    model = nn.Sequential(linear(), nn.Tanh())
    calls = iter(range(10))

    def fails_in_run(number: int) -> Any:
        def loss_fn(output: Tensor, _: Any) -> Tensor:
            if next(calls) == number:
                raise KeyError("mine")
            return output.sum()

        return loss_fn

    for number, name in enumerate(["plain", "second plain", "budgeted"]):
        calls = iter(range(10))
        with pytest.raises(KeyError, match="mine") as raised:
            audit(model, torch.ones(1, 4), fails_in_run(number))
        assert raised.value.__notes__ == [
            "The step called Sequential(batch) with float32[1, 4].",
            f"Raised in the {name} run of an audit; the state before it was restored.",
        ]
        assert not any(has_region(module) for module in model.modules())
