"""A profile as a page of text."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import membudget as mb
from membudget.report import sparkline
from membudget.report.module_tree import Figures, fold, summarise
from membudget.report.profile_text import MOST_ROWS, WIDTH, visible
from tests.profile.random_steps import steps
from tests.profile.small_models import convolutions, language_model, perceptron
from tests.strategies import generated


@pytest.fixture(scope="module")
def gpt() -> mb.Profile:
    return mb.profile(
        *language_model(vocabulary=5000, blocks=12),
        fake=True,
        device="h100",
        optimizer=torch.optim.AdamW,
    )


def test_a_report_says_what_was_profiled(gpt):
    report = gpt.report()

    assert report == str(gpt)
    assert report.startswith("LanguageModel: one training step, recorded on fake")
    for words in ("roofline of H100 SXM5", "loss_fn(output, batch)", *gpt.notes[:1]):
        assert words[:60] in report


def test_a_report_accounts_for_every_byte_of_the_total(gpt):
    static = gpt.graph.static
    report = gpt.report()

    for size in (static.parameters, static.optimizer, static.inputs, gpt.peak_bytes):
        assert f"{size:,}" in report
    assert f"{static.total + gpt.peak_bytes:,}" in report


def test_the_report_of_a_language_model_names_the_logits(gpt):
    report = " ".join(gpt.report().split())

    assert "The logits, float32[32, 5000], and what the loss computes" in report
    assert "Chunk the loss" in report
    assert "_log_softmax float32[32, 5000]" in report


def test_equal_blocks_are_one_row(gpt):
    lines = gpt.report().splitlines()

    assert sum("h.0 … h.11 (12×)" in line for line in lines) == 1
    assert not any(line.split()[:1] == ["h.5"] for line in lines)
    # Rows of what the blocks keep, too.
    assert any("12 ×" in line and "h.*.down" in line for line in lines)


def test_the_timeline_marks_where_the_backward_begins(gpt):
    lines = gpt.report().splitlines()
    row = next(i for i, line in enumerate(lines) if "└forward" in line)
    bars, marks, peak = lines[row - 1], lines[row], lines[row + 1]
    graph = gpt.graph

    column = graph.backward_start * 80 // len(graph.operators)
    assert marks.index("└backward") == 2 + column
    assert "└optimizer" in marks
    assert bars[peak.index("▲")] == "█"


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("make", [language_model, perceptron, convolutions])
def test_a_report_is_the_same_after_json(make, fake):
    found = mb.profile(*make(), fake=fake)

    assert mb.Profile.from_json(found.to_json()).report() == found.report()


def test_a_profile_is_the_same_after_json(gpt, tmp_path):
    path = tmp_path / "profile.json"
    gpt.to_json(path)

    assert mb.Profile.from_json(path) == gpt


def broken(text: str) -> dict[str, str]:
    """Return what is no profile, or no whole one, by what is said of it."""
    newer = json.loads(text)
    newer["graph"]["version"] += 1
    headless = json.loads(text)
    del headless["model"]
    return {
        "the profile cannot be read: Expecting .*char": text[: len(text) // 2],
        "the data has version 2": json.dumps(newer),
        "incomplete: KeyError\\('model'\\)": json.dumps(headless),
        "incomplete: KeyError": "{}",
        "a profile is a JSON object; this is a list": "[1, 2]",
        "the profile cannot be read: Expecting value": "What?",
    }


@pytest.mark.parametrize("number", range(6))
def test_a_file_that_holds_no_profile_is_rejected(gpt, tmp_path, number):
    message, text = list(broken(gpt.to_json()).items())[number]
    path = tmp_path / "profile.json"
    path.write_text(text)

    with pytest.raises(mb.OptionError, match=message):
        mb.Profile.from_json(path)


@pytest.mark.parametrize("make", [language_model, perceptron, convolutions])
def test_a_real_report_says_that_its_times_were_measured(make):
    report = mb.profile(*make()).report()

    assert "recorded on real tensors" in report
    assert ", measured" in report


def test_a_model_of_many_parts_has_few_rows():
    widths = range(2, 66)
    layers = [nn.Linear(a, a + 1) for a in widths]
    found = mb.profile(nn.Sequential(*layers), torch.ones(4, 2), fake=True)
    root = fold(summarise(found.graph).modules)
    rows = visible(root)

    assert len(rows) <= MOST_ROWS
    assert any("more)" in node.label for _, node in rows)
    parts = (node.figures for depth, node in rows if depth == 1)
    assert sum(parts, Figures()).saved_bytes == root.figures.saved_bytes


def test_names_with_brackets_are_printed_as_they_are():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"[red]": nn.Linear(4, 4)})

        def forward(self, x):
            return self.layers["[red]"](x)

    assert "[red]" in mb.profile(Odd(), torch.ones(2, 4), fake=True).report()


@generated(max_examples=100)
@given(steps())
def test_every_step_has_a_report_that_fits_the_page(graph):
    report = mb.Profile(graph, "Model", "fake", "H100", "the output").report()

    assert max(map(len, report.splitlines())) <= WIDTH


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=300), st.integers(1, 99))
def test_a_sparkline_shows_the_maximum_of_each_column(values, columns):
    bars = sparkline(values, columns)

    assert len(bars) == columns
    assert ("█" in bars) == any(values)
    if all(values):
        assert " " not in bars


def test_a_sparkline_of_no_values_is_empty():
    assert sparkline([], 80) == ""
