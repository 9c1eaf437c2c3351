"""What is being done is seen on a terminal and in the log, and nowhere else."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from torch import nn

import membudget as mb
from membudget.cli import OK, main
from membudget.progress import stage
from tests.planner.models import mlp


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return each line that was drawn, "" where the line was erased."""
        return self.getvalue().split("\r\x1b[K")[1:]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "membudget"]


def test_a_fit_draws_each_stage_on_a_terminal_and_leaves_nothing():
    model, batch = mlp()
    with redirect_stderr(Terminal()) as terminal:
        mb.fit(model, batch, "60%", fake=True).remove()
    drawn = terminal.lines()
    assert drawn[::2] == [
        "membudget: recording the step, without memory",
        "membudget: planning",
        "membudget: trying plan 1 of at most 4",
    ]
    assert set(drawn[1::2]) == {""}


def test_nothing_is_drawn_where_the_output_is_no_terminal(capfd, caplog):
    caplog.set_level(logging.INFO, "membudget")
    model, batch = mlp()
    mb.fit(model, batch, "60%", fake=True).remove()
    assert capfd.readouterr() == ("", "")
    assert messages(caplog) == [
        "recording the step, without memory",
        "planning",
        "trying plan 1 of at most 4",
    ]


def test_the_logger_adds_no_output_of_its_own():
    handlers = logging.getLogger("membudget").handlers
    assert [type(handler) for handler in handlers] == [logging.NullHandler]


def test_the_line_is_erased_when_the_work_fails():
    class Fails(nn.Linear):
        def forward(self, _: object) -> None:  # type: ignore[override]
            raise ArithmeticError("in the middle")

    with (
        redirect_stderr(Terminal()) as terminal,
        pytest.raises(ArithmeticError, match="in the middle"),
    ):
        mb.profile(Fails(2, 2), None)
    assert terminal.lines() == ["membudget: recording the step", ""]


def test_a_stage_inside_of_another_gives_the_line_back():
    with redirect_stderr(Terminal()) as terminal, stage("outer"), stage("inner"):
        pass
    shown = ["outer", "inner", "outer", ""]
    assert terminal.lines() == [f"membudget: {s}" if s else "" for s in shown]


def test_a_line_is_never_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    with redirect_stderr(Terminal()) as terminal, stage("x" * 100):
        pass
    assert terminal.lines() == ["membudget: " + "x" * 18, ""]


@pytest.mark.parametrize("stream", ["none", "closed", "broken"])
def test_a_stream_that_cannot_be_written_stops_no_work(monkeypatch, stream):
    class Broken(Terminal):
        def write(self, _: str) -> int:
            raise BrokenPipeError("nobody reads")

    streams = {"none": None, "closed": Terminal(), "broken": Broken()}
    streams["closed"].close()  # type: ignore[union-attr]
    monkeypatch.setattr(sys, "stderr", streams[stream])
    with stage("working"):
        done = True
    assert done


STEP = """
import torch
def make():
    linear = lambda: torch.nn.Linear(32, 32)
    blocks = [torch.nn.Sequential(linear(), torch.nn.GELU()) for _ in range(4)]
    return torch.nn.Sequential(*blocks), torch.ones(128, 32)
"""


@pytest.mark.parametrize(
    ("command", "stages"),
    [
        ("plan --budget 60%", "recording the step|planning"),
        (
            "fit --budget 60% --steps 2",
            "recording the step|planning|trying plan 1 of at most 4|running 2 steps|"
            "comparing with the plain step",
        ),
        ("tradeoff --budgets 2", "recording the step|planning each budget"),
    ],
)
def test_a_command_shows_its_stages(tmp_path: Path, command: str, stages: str):
    path = tmp_path / "target_progress.py"
    path.write_text(STEP)
    name, *options = command.split()
    with redirect_stderr(Terminal()) as terminal:
        assert main([name, f"{path}:make", *options]) == OK
    drawn = "\n".join(line for line in terminal.lines() if line)
    assert drawn == "\n".join(f"membudget: {s}" for s in stages.split("|"))
