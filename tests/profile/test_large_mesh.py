"""Llama 3 70B on 64 devices is predicted and planned in one process, in 2 GiB.

The numbers of parameters are Meta's; a rank has an eighth of what tensor parallelism
leaves whole, and a 64th of the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.ranks import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(
        not torch.distributed.is_available(),
        reason="torch was built without distributed",
    ),
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(),
        reason="this system does not say how much memory a process has used",
    ),
]

WIDTH, KEYS, HIDDEN, LAYERS, WORDS = 8192, 1024, 28672, 80, 128256
GIB = 1 << 30

PLANNED = """
import sys
from membudget.cli import main
assert main(sys.argv[1:]) in (0, None)
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):  # Peak of the resident memory, in KiB.
        print(f"used {int(line.split()[1]) << 10}")
"""


def test_seventy_billion_parameters_on_64_devices_are_planned_in_2_gib(tmp_path: Path):
    plan_file = tmp_path / "plan.json"
    command = ["plan", str(ROOT / "examples" / "llama.py") + ":make", "--fake"]
    command += ["--mesh", "dp_shard=8,tp=8", "--optimizer", "adamw"]
    command += ["--device", "h100", "--budget", "60GiB", "-o", str(plan_file)]
    ran = subprocess.run(
        [sys.executable, "-c", PLANNED, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    (used,) = (line for line in ran.stdout.splitlines() if line.startswith("used "))
    assert int(used.split()[1]) < 2 * GIB

    plan = json.loads(plan_file.read_text())
    layer = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * HIDDEN
    norms, words = (2 * LAYERS + 1) * WIDTH, 2 * WORDS * WIDTH
    assert 70e9 < LAYERS * layer + norms + words < 71e9
    parameters = 2 * (LAYERS * layer // 64 + (norms + words) // 8)
    # Of the 60 GiB, parameters and AdamW's two moments are there before the step.
    before = 60 * GIB - plan["budget_bytes"]
    assert 3 * parameters <= before < 3 * parameters + (1 << 20)
    assert plan["peak_bytes"] <= plan["budget_bytes"] < plan["plain_peak_bytes"]
    paths = {region["path"] for region in plan["regions"]}
    assert paths <= {f"layers.{number}" for number in range(LAYERS)}
    assert len(paths) > LAYERS // 2
