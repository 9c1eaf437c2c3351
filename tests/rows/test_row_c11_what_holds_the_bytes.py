"""Row C11: a refusal says what holds the bytes; a share may leave gradients out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.allowance import Budget, gradient_bytes, share_of
from membudget.cli import FAILED, OK, main
from membudget.errors import BudgetError, OptionError
from membudget.fit import fit
from membudget.planner.plan import Plan
from membudget.planner.planner import Planner
from membudget.planning import plan_for, planner_of
from membudget.refusal import cannot_fit
from tests.planner.models import MODELS


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose gradients are larger than all of its activations."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks), torch.randn(64, 256)


GRADIENTS = 4 * (256 * 256 + 256) * 4


def test_gradients_that_alone_exceed_the_budget_are_named_without_a_search(monkeypatch):
    def searched(*_: Any) -> Any:
        raise AssertionError("a plan was searched for")

    monkeypatch.setattr(Planner, "fastest", searched)
    model, batch = wide()
    words = rf"Gradients of parameters alone take {GRADIENTS:,} bytes.*of activations"
    with pytest.raises(BudgetError, match=words) as raised:
        fit(model, batch, "50%")
    monkeypatch.undo()
    with fit(model, batch, raised.value.least_bytes) as fitted:
        assert fitted.plan.budget_bytes > GRADIENTS


def parts_of(words: str) -> tuple[int, list[int]]:
    """Return the bytes that a refusal explains, and those of each line."""
    found = re.search(r"predicted to take ([\d,]+) bytes in all, in .*:\n", words)
    assert found is not None, words
    lines = words[found.end() :].splitlines()
    sizes = [line.split()[0] for line in lines]
    total, *parts = (int(size.replace(",", "")) for size in (found[1], *sizes))
    return total, parts


@pytest.mark.parametrize("name", ["mlp", "gpt", "unet", "tied_weights"])
def test_a_refusal_says_what_the_smallest_plan_holds_at_its_peak(name):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    found = mb.profile(model, batch, fake=True)
    with pytest.raises(BudgetError, match="The smallest plan is predicted") as raised:
        plan_for(found, model, "1%")
    total, parts = parts_of(str(raised.value))
    assert parts == [holder.bytes for holder in raised.value.holders]
    least_bytes = planner_of(found).least_bytes()
    assert total == sum(parts) == least_bytes + found.graph.static.total
    assert all(size > 0 for size in parts)


class Speaks(nn.Module):
    """A narrow body before a wide head, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.head = nn.Linear(16, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh()).logsumexp(-1).sum()


def test_the_logits_are_named_with_their_module_and_operator():
    model, batch = Speaks(), torch.randn(512, 16)
    with pytest.raises(BudgetError, match="no plan fits in") as raised:
        fit(model, batch, "20%", fake=True)
    largest = raised.value.holders[0]
    assert largest.kind == "loss"
    assert largest.name == "the output of head and its loss, float32[512, 4096]"
    assert largest.bytes >= 2 * 512 * 4096 * 4
    assert f"{largest.name}: compute the loss in chunks" in str(raised.value)


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_is_below_what_certainly_cannot_fit(name):
    torch.manual_seed(0)
    found = mb.profile(*MODELS[name](), fake=True)
    assert gradient_bytes(found.graph) <= found.peak_bytes
    assert not cannot_fit(found.graph, Budget(found.peak_bytes, 0))
    if len(found.graph.operators) < 150:
        assert not cannot_fit(found.graph, Budget(planner_of(found).least_bytes(), 0))


# Shares


@pytest.mark.parametrize("text", ["40% of activations", " 40 %  OF  Activations "])
def test_a_share_of_activations_leaves_the_gradients_whole(text):
    model, batch = wide()
    found = mb.profile(model, batch, fake=True)
    above = found.peak_bytes - GRADIENTS
    assert Budget.of(text, found).step_bytes == GRADIENTS + int(0.4 * above)
    assert Budget.of("100% of activations", found).step_bytes == found.peak_bytes


def test_frozen_parameters_have_no_gradients():
    model, batch = wide()
    model[1].requires_grad_(False)  # type: ignore[index]
    found = mb.profile(model, batch, fake=True)
    assert gradient_bytes(found.graph) == GRADIENTS * 3 // 4


def test_a_step_is_fitted_into_a_share_of_its_activations():
    torch.manual_seed(0)
    model, batch = MODELS["mlp"]()
    with fit(model, batch, "50% of activations", fake=True) as fitted:
        assert fitted.plan.regions
        gradients = gradient_bytes(fitted.profile.graph)
        above = fitted.profile.peak_bytes - gradients
        assert fitted.plan.budget_bytes == gradients + above // 2
        assert fitted.peak_bytes <= fitted.plan.budget_bytes


STEP = """
from tests.rows.test_row_c11_what_holds_the_bytes import wide as make
"""


def test_the_command_line_takes_a_share_of_activations(tmp_path: Path, capsys: Any):
    target, path = tmp_path / "target_c11.py", tmp_path / "plan.json"
    target.write_text(STEP)
    plan = ["plan", f"{target}:make", "--fake", "-o", str(path), "--budget"]
    assert main([*plan, "100% of activations"]) == OK
    found = mb.profile(*wide(), fake=True)
    expected = Budget.of("100% of activations", found).step_bytes
    assert Plan.from_json(path).budget_bytes == expected
    assert main([*plan, "0.4"]) == FAILED
    assert "give a share of the plain step's peak, such as '40%'" in (
        capsys.readouterr().err
    )


# Numbers that are mistakes


class Never(nn.Linear):
    """A layer that is not to run."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a step ran")


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (0.4, r"0\.4 bytes is probably a mistake: .* such as '40%', or a total"),
        ("0.4", r"'0\.4' bytes is probably a mistake: .* such as '40%', or a"),
        (1.0, r"is probably a mistake: .* such as '100%'"),
        (1, r"is probably a mistake: .* such as '100%'"),
        (0, r"0 bytes is probably a mistake: .* such as '40%', or .* '8GiB'"),
        ("0", r"'0' bytes is probably a mistake"),
        ("0 GiB", r"'0 GiB' bytes is probably a mistake"),
        ("0.1B", r"'0\.1B' bytes is probably a mistake"),
        (-5, "a size is a number of bytes, such as '8GiB'; got -5"),
        (-0.4, r"a size is a number of bytes, such as '8GiB'; got -0\.4"),
        ("140%", "at most 100, .* got '140%'. For more .* give bytes, such as '8GiB'"),
        ("-40%", "above 0 and at most 100"),
        ("0% of activations", "above 0 and at most 100"),
        ("40% of the peaks", "such as '40%' or '40% of activations'; got '40% of the"),
        ("40% 50%", "such as '40%' or '40% of activations'"),
        ("nan%", "above 0 and at most 100"),
    ],
)
def test_a_number_that_is_a_mistake_is_refused_before_any_work(budget, words):
    with pytest.raises(OptionError, match=words):
        fit(Never(4, 4), torch.ones(2, 4), budget)
    found = mb.profile(nn.Linear(4, 4), torch.ones(2, 4), fake=True)
    with pytest.raises(OptionError, match=words):
        plan_for(found, nn.Linear(4, 4), budget)


def test_a_share_is_read_with_what_it_is_of():
    assert share_of("40%") == (0.4, False)
    assert share_of("40% of activations") == (0.4, True)
    assert share_of(" 12.5 % ") == (0.125, False)
    assert share_of("8GiB") is None
