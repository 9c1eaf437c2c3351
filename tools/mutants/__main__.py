"""Draw mutants at random, run the tests that cover each, and print which survive."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.mutants.children import preload, run_jobs
from tools.mutants.covering import (
    Measured,
    Measurement,
    batches,
    files_of_tests,
    matching,
    places,
)
from tools.mutants.equivalent import read_equivalents
from tools.mutants.find import draw
from tools.mutants.report import Report
from tools.mutants.trees import copy_tree
from tools.mutants.verdict import Trial, Verdict

# `run.py` starts this in the repository.
ROOT = Path.cwd()
CACHE = ROOT / ".mutants"
EQUIVALENT = Path("tests/tools/equivalent.toml")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 where a mutant survives that is not listed."""
    options = read_options(arguments)
    report = Report(read_equivalents(ROOT / EQUIVALENT), options.seed)
    CACHE.mkdir(exist_ok=True)
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(options.workers)]
        for tree in trees:
            copy_tree(ROOT, tree)
        for found in run(options, trees):
            print(report.add(found), flush=True)
    print(report.summary())
    return 1 if report.missed else 0


def run(options: argparse.Namespace, trees: Sequence[Path]) -> Iterator[Verdict]:
    """Draw mutants and yield the verdict on each as it comes."""
    # Not the checkout, which may be edited in the meantime.
    root = trees[0]
    sources = files_of(root, options.paths)
    tests = files_of(root, options.tests, "test_*.py") or files_of_tests(root, sources)
    measured = measure(root, tests, trees)
    mutants = draw(root, sources, options.seed, options.count)
    notes = root.parent / "notes"
    notes.mkdir()
    trials = [
        Trial(mutant, batches(mutant, measured, options.most), notes / str(number))
        for number, mutant in enumerate(mutants)
    ]
    for trial in trials:
        if not trial.batches:
            yield trial.verdict(0, 0.0)
    for ended in run_jobs([trial for trial in trials if trial.batches], trees):
        yield ended.job.verdict(ended.code, ended.seconds)


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="run.py mutants", description=__doc__)
    add = parser.add_argument
    add("paths", nargs="*", default=["src/membudget"], help="what to plant faults in")
    add("--seed", type=int, default=0, help="which mutants are drawn (default: 0)")
    add("--count", type=int, default=100, help="number of mutants (default: 100)")
    add("--workers", type=int, default=2, help="processes at a time (default: 2)")
    tests = (
        "folders or files of tests (default: those of these files, and of behaviour)"
    )
    add("--tests", nargs="+", default=[], help=tests)
    most = (
        "leave out the slowest tests of a mutant, so that the rest take so many CPU s"
    )
    add("--most", type=float, default=math.inf, metavar="SECONDS", help=most)
    return parser.parse_args(arguments)


def files_of(root: Path, names: Sequence[str], pattern: str = "*.py") -> list[Path]:
    """Return the files that match a pattern in some folders, and named files."""
    return sorted({path for name in names for path in matching(root / name, pattern)})


def measure(root: Path, tests: Sequence[Path], trees: Sequence[Path]) -> list[Measured]:
    """Return what each file of tests runs, measuring those that have changed."""
    found = places(root, CACHE, tests)
    ready = {name: data.with_suffix(".json") for name, data in found.items()}
    jobs = [
        Measurement(name, "src/membudget", data)
        for name, data in found.items()
        if not ready[name].exists()
    ]
    for number, ended in enumerate(run_jobs(jobs, trees), start=1):
        told = f"{ended.seconds:.0f} s, {ended.job.name}"
        print(f"measured {number} of {len(jobs)} files of tests: {told}", flush=True)
    return [Measured(name, found[name]) for name in found if ready[name].exists()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
