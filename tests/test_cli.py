"""The command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import membudget
from membudget.cli import DIFFERENT, FAILED, OK, main
from tests.commands import without_torch

GOOD = """
import torch

def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)]
    return torch.nn.Sequential(*layers), torch.ones(2, 4)

def make_with_loss():
    return *make(), lambda output, batch: output.square().sum()

def wrong():
    return "model"

def broken():
    raise ValueError("the data is not there")
"""

BAD = """
import torch
import membudget as mb

class Impure(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return (y * (3 if mb.is_recomputing() else 2)).sin()

def make():
    return torch.nn.Sequential(Impure(), Impure()), torch.ones(2, 4)
"""


@pytest.fixture
def good(tmp_path: Path) -> str:
    path = tmp_path / "target_good.py"
    path.write_text(GOOD)
    return str(path)


def test_help_answers_without_importing_torch():
    out = without_torch()
    assert "audit" in out
    assert "profile" in out


@pytest.mark.parametrize("function", ["make", "make_with_loss"])
def test_an_equal_step_gives_0_and_a_report(good, tmp_path, capsys, function):
    report = tmp_path / "report.json"
    code = main(["audit", f"{good}:{function}", "--json", str(report)])
    assert code == OK
    assert "equal" in capsys.readouterr().out
    assert json.loads(report.read_text())["equal"] is True


def test_a_differing_step_gives_1_and_names_the_gradient(tmp_path, capsys):
    path = tmp_path / "target_bad.py"
    path.write_text(BAD)
    assert main(["audit", f"{path}:make"]) == DIFFERENT
    assert "0.linear.weight" in capsys.readouterr().out


def test_names_choose_the_regions(good, capsys):
    assert main(["audit", f"{good}:make", "--names", "2"]) == OK
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "TARGET is file.py:function"),
        ("missing.py:make", "there is no file"),
        ("GOOD:missing", "has no function 'missing'"),
        ("GOOD:wrong", "it returned a str"),
        ("GOOD:make --names nowhere", "no module of Sequential matches"),
        ("GOOD:make --json missing/report.json", "the report cannot be written"),
        # A traceback is of use here, but its exit code would mean a difference.
        ("GOOD:broken", "ValueError: the data is not there"),
    ],
)
def test_a_bad_target_gives_2_and_says_why(good, capsys, target, message):
    assert main(["audit", *target.replace("GOOD", good).split()]) == FAILED
    assert message in capsys.readouterr().err


# membudget profile


STEP = """
import torch
from torch import nn

def make(batch=2, width=8, name="plain"):
    layers = [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4)]
    return nn.Sequential(*layers), torch.ones(batch, width)

def huge(batch=2):
    return nn.Linear(10**6, 10**6), torch.ones(batch, 10**6)

def asks():
    rates = torch.linspace(0, 0.1, 4).tolist()
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(rates[1])), torch.ones(2, 4)

def broken():
    raise RuntimeError("the data is not there")
"""


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "target_step.py"
    path.write_text(STEP)
    return str(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", ["recorded on real tensors", ", measured", "advice"]),
        ("--fake", ["recorded on fake tensors", "inputs", "64 B", "advice"]),
        ("--fake --device h100", ["roofline of H100 SXM5"]),
        ("--device cpu", ["recorded on real tensors", "roofline of this CPU"]),
        ("--fake --batch 16", ["512 B"]),
        ("--fake --set batch=16 --set name=other", ["512 B"]),
        # AdamW keeps two tensors a parameter, and a step for each.
        ("--fake --optimizer AdamW", ["optimizer state", f"{2 * 420 * 4 + 4 * 4:,}"]),
        ("--fake --budget 1MiB", ["fits 1.0 MiB"]),
        ("--fake --budget 10", ["does NOT fit 10 B"]),
    ],
)
def test_a_profile_is_printed(step, capsys, options, words):
    assert main(["profile", f"{step}:make", *options.split()]) == OK
    out = capsys.readouterr().out
    assert [word for word in words if word not in out] == []


def test_a_profile_is_written_as_json(step, tmp_path, capsys):
    path = tmp_path / "profile.json"

    assert main(["profile", f"{step}:make", "--fake", "--json", str(path)]) == OK
    assert membudget.Profile.from_json(path).report() == capsys.readouterr().out.strip()


def test_a_model_that_fits_no_memory_can_be_profiled(step, capsys):
    assert main(["profile", f"{step}:huge", "--fake", "--optimizer", "sgd"]) == OK
    assert f"{4 * (10**12 + 10**6):,}" in capsys.readouterr().out


def test_a_sweep_is_printed_with_the_largest_size(step, tmp_path, capsys):
    path = tmp_path / "sweep.json"
    options = ["--fake", "--sweep", "batch=1,2,4", "--set", "width=16"]
    options += ["--budget", "1MiB", "--json", str(path)]

    assert main(["profile", f"{step}:make", *options]) == OK
    out = capsys.readouterr().out
    assert "+ 64 batch" in out
    assert "largest batch in 1.0 MiB: " in out
    assert "beyond what was measured" in out
    assert json.loads(path.read_text())["name"] == "batch"


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("100", "no batch fits 100 B"),
        ("5500", "KiB, between what was measured"),
        ("BYTES", "as measured"),
    ],
)
def test_the_largest_size_says_where_it_lies(step, capsys, budget, words):
    def make(batch):
        import torch
        from torch import nn

        layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)]
        return nn.Sequential(*layers), torch.ones(batch, 8)

    if budget == "BYTES":
        found = membudget.sweep(make, batch=[1, 16])
        budget = str(found.points[1].total_bytes)
    options = ["--fake", "--sweep", "batch=1,16", "--budget", budget]
    assert main(["profile", f"{step}:make", *options]) == OK
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("make --sweep batch", "--sweep takes NAME=N,N,..., such as batch=1,2,4"),
        ("make --sweep batch=1,x", "got 'batch=1,x'"),
        ("make --sweep batch=1", "at least two different sizes of batch"),
        ("make --sweep depth=1,2", "make(depth=1) cannot be called"),
        ("make --sweep batch=1,2 --batch 3", "batch is swept, so it cannot be set"),
        ("make --sweep device=1,2", "a size cannot be called 'device'"),
        ("make --sweep cache=1,2", "a size cannot be called 'cache'"),
        ("make --batch 0", "--batch must be at least 1; got 0"),
        ("make --set batch", "--set takes NAME=VALUE, such as batch=4; got 'batch'"),
        ("make --set depth=3", "make(depth=3) cannot be called"),
        ("make --budget much", "a size is a number of bytes"),
        ("make --device abacus", "there is no device 'abacus'"),
        ("make --optimizer magic", "torch.optim has no optimizer 'magic': it has"),
        ("asks --fake", "the function reads some"),
        ("make --fake --json missing/profile.json", "cannot be written"),
        # A traceback is of use here, but its exit code would mean a difference.
        ("broken --fake", "RuntimeError: the data is not there"),
    ],
)
def test_a_profile_that_cannot_be_made_gives_2_and_says_why(
    step, capsys, options, message
):
    target, *rest = options.split()
    assert main(["profile", f"{step}:{target}", *rest]) == FAILED
    assert message in capsys.readouterr().err
