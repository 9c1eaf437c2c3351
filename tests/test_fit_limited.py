"""A model whose plain step does not fit is fitted: in a limited address space."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import membudget

PROGRAM = Path(__file__).with_name("limited_step.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux"),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own."""
    source = str(Path(membudget.__file__).parents[1])
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": source},
    )


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Return the losses of plain steps without a limit."""
    path = tmp_path_factory.mktemp("limited") / "unlimited.pt"
    done = run("0", str(path))
    assert done.returncode == 0, done.stderr
    losses: torch.Tensor = torch.load(path)
    return losses


def check_fitted_where_plain_dies(
    unlimited: torch.Tensor, tmp_path: Path, more_mib: int, mode: str, budget_mib: int
) -> None:
    plain = run(str(more_mib), str(tmp_path / "plain.pt"))
    assert plain.returncode != 0
    assert "can't allocate memory" in plain.stderr or "MemoryError" in plain.stderr

    path = tmp_path / "fitted.pt"
    done = run(str(more_mib), str(path), mode, str(budget_mib))
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(path), unlimited)


@pytest.mark.parametrize(
    ("more_mib", "mode", "budget_mib"),
    [(190, "auto", 150), (140, "auto", 100), (150, "full", 100)],
)
def test_a_step_that_does_not_fit_plain_is_fitted_and_trains_alike(
    unlimited, tmp_path, more_mib, mode, budget_mib
):
    check_fitted_where_plain_dies(unlimited, tmp_path, more_mib, mode, budget_mib)
