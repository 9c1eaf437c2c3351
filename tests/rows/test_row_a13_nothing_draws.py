"""Row A13: what a user draws next does not depend on whether membudget was used.

Importing a library may draw (rich does, from Python's `random`), and that happens once
in a process: each test asks a fresh one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import membudget

BEGIN = """
import random, sys
import numpy, torch
from torch import nn

torch.set_num_threads(1)
random.seed(9); numpy.random.seed(9); torch.manual_seed(9)
def streams():
    return (
        random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
    )
before = streams()
import membudget as mb

def model():
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks)
"""
# The model draws its weights itself.
MODEL = """
net, x = model(), torch.ones(64, 32)
before = streams()
"""
PARTS = """
import pkgutil, importlib
for module in pkgutil.walk_packages(mb.__path__, "membudget."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in mb.__all__:
    getattr(mb, name)
"""
PROGRAMS = {
    "import of every part": PARTS,
    "fit": MODEL
    + """
mb.checkpoint(net, x, engine="replay").sum().backward()
with mb.fit(net, x, "90%") as fitted:
    print(fitted.report())
try:
    mb.fit(net, x, "1KiB")
except mb.BudgetError as error:
    print(error)
""",
    "profile": MODEL
    + """
profile = mb.profile(net, x)
print(profile.report(), mb.tradeoff(profile), mb.profile(net, x, fake=True).report())
print(mb.peak(lambda: net(x).sum().backward()), mb.saved(net, x))
""",
    "audit": MODEL
    + """
print(mb.audit(net, x))
applied = mb.apply(net, blocks=nn.Sequential)
net(x).sum().backward()
print(applied.status())
""",
    "command": """
open("net.py", "w").write(
    "from torch import nn, ones\\ndef make(): return nn.LayerNorm(4), ones(2, 4)\\n"
)
from membudget.cli import main
assert main(["profile", "net.py:make", "--fake"]) == 0
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_row_a13_the_global_streams_stay_where_they_were(
    name: str, tmp_path: Path
) -> None:
    source = Path(membudget.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + PROGRAMS[name] + "\nassert streams() == before"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
