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
    reasons = read_equivalents(ROOT / EQUIVALENT)
    CACHE.mkdir(exist_ok=True)
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(options.workers)]
        for tree in trees:
            copy_tree(ROOT, tree)
        sources = files_of(options.paths)
        tests = files_of(options.tests, "test_*.py") or files_of_tests(ROOT, sources)
        measured = measure(tests, trees)
        notes = Path(folder) / "notes"
        notes.mkdir()
        mutants = draw(ROOT, sources, options.seed, options.count)
        trials = [
            Trial(mutant, batches(mutant, measured, options.most), notes / str(number))
            for number, mutant in enumerate(mutants)
        ]
        report = Report(reasons, options.seed)
        for found in judged(trials, trees):
            print(report.add(found), flush=True)
    print(report.summary())
    return 1 if report.missed else 0


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


def files_of(names: Sequence[str], pattern: str = "*.py") -> list[Path]:
    """Return the files that match a pattern in some folders, and named files."""
    return sorted(
        {f for name in names for f in matching((ROOT / name).resolve(), pattern)}
    )


def measure(tests: Sequence[Path], trees: Sequence[Path]) -> list[Measured]:
    """Return what each file of tests runs, measuring those that have changed."""
    found = places(ROOT, CACHE, tests)
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


def judged(trials: Sequence[Trial], trees: Sequence[Path]) -> Iterator[Verdict]:
    """Yield the verdict on each mutant as it comes."""
    for trial in trials:
        if not trial.batches:
            yield trial.verdict(0, 0.0)
    for ended in run_jobs([trial for trial in trials if trial.batches], trees):
        yield ended.job.verdict(ended.code, ended.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
