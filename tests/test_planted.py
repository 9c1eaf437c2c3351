"""The tests on the emulated device find faults: each patch plants one, in a copy.

`tests/emulated/planted` holds one fault a file: what is wrong and what a user would
see, then a diff. They stand for what is easily got wrong in device code and what no
test on the CPU sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from run import DEVICE_TESTS
from tests.emulated.library import DEVICE
from tools.mutants.trees import copy_tree

ROOT = Path(__file__).parents[1]
PATCHES = sorted((ROOT / "tests/emulated/planted").glob("*.patch"))
SUITE = (
    *("-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider"),
    *("--device=emu", "-m", "not slow"),
)


def apply(patch: Path, tree: Path, *options: str) -> None:
    """Apply a patch to a tree; nothing of it may have moved away or be unlike."""
    # A repository around the tree would make git skip files that are not its own.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(
        command, cwd=tree, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def failures_in(tree: Path, *options: str) -> tuple[int, list[str]]:
    """Run the suite on the device; return its exit code and the tests that failed."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    for tests in DEVICE_TESTS:  # As `run.py test` does.
        done = subprocess.run(
            [sys.executable, *SUITE, *options, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stdout.splitlines()
            return done.returncode, [x for x in lines if x.startswith("FAILED ")]
    return 0, []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the tests need."""
    if why_not := DEVICE.why_not():
        pytest.skip(f"the emulated device: {why_not}")
    copy_tree(ROOT, tmp_path)
    return tmp_path


def test_there_are_thirty_nine_faults_and_each_says_what_is_wrong():
    assert len(PATCHES) == 39
    for patch in PATCHES:
        apply(patch, ROOT, "--check")
        text, _, diff = patch.read_text(encoding="utf-8").partition("\n\n--- a/src/")
        assert text.endswith("."), patch.name
        assert "\n+++ b/src/membudget/" in diff, patch.name


@pytest.mark.slow
def test_the_suite_passes_where_no_fault_is_planted(tree: Path):
    assert failures_in(tree) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_planted_fault_is_found_by_the_tests_on_the_device(patch: Path, tree: Path):
    apply(patch, tree)
    code, failed = failures_in(tree, "-x")
    assert (code, len(failed)) == (1, 1)
