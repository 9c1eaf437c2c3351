"""Jobs in forked processes: how they end is known, whatever they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# In a process of its own: this one has threads and has imported what a child must not.
SCRIPT = """
import os, sys, time
from pathlib import Path
from tools.mutants import children
from tools.mutants.children import run_jobs

children.IDLE_S, children.IDLE_CPU_S, children.LOOK_S = 3.0, 0.01, 0.2

class Job:
    def __init__(self, name, work):
        self.name, self.work, self.limit_s = name, work, 1
    def prepare(self, tree):
        (tree / "planted").write_text(self.name)
    def clean(self, tree):
        (tree / "planted").unlink()

def spin():
    while True:
        pass

def fail():
    raise ValueError

def where():
    here = Path("planted").read_text() == "where"
    return 10 + here + 2 * sys.path[0].endswith("/src")

jobs = [
    *(Job("spins", spin), Job("raises", fail), Job("where", where)),
    *(Job("answers", lambda: 3), Job("dies", lambda: os.abort())),
    Job("waits", lambda: time.sleep(600)),
]
trees = [Path(name) for name in sys.argv[1:]]
for ended in run_jobs(jobs, trees):
    print(ended.job.name, ended.code, ended.seconds < 60)
print([path.name for tree in trees for path in tree.iterdir()])
"""


def test_a_job_ends_with_its_code_its_signal_or_its_limit_of_cpu_time(tmp_path):
    trees = [tmp_path / "0", tmp_path / "1"]
    for tree in trees:
        tree.mkdir()
    command = [sys.executable, "-c", SCRIPT, *map(str, trees)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *ended, left = done.stdout.splitlines()
    assert sorted(ended) == [
        "answers 3 True",
        "dies -6 True",
        "raises 255 True",
        "spins -24 True",
        "waits -9 True",
        "where 13 True",
    ]
    assert left == "['log.txt', 'log.txt']"
