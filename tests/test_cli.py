"""The command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import membudget
from membudget.cli import DIFFERENT, FAILED, OK, main

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
    code = (
        "import sys; from membudget.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    source = str(Path(membudget.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert "audit" in done.stdout


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
