"""Run a campaign: `python3 -m tests.fuzz --seed 0 --count 1000 --engine replay`."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.fuzz.campaign import Counts, Failure, campaign
from tests.fuzz.check import ENGINES
from tests.fuzz.shrink import shrink, snippet
from tests.fuzz.statements import KINDS


def main() -> int:
    """Print the counts of verdicts, then each failure as a program that runs."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="number of programs")
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--shrink", type=int, default=20, help="failures to minimise")
    parser.add_argument("--without", action="append", default=[], metavar="TEXT")
    options = parser.parse_args()
    without = options.without
    kinds = [k for k in KINDS if not any(text in k.text for text in without)]
    torch.set_num_threads(1)
    seconds = time.process_time()
    seeds = range(options.seed, options.seed + options.count)
    counts, failures = campaign(seeds, options.engine or ENGINES, kinds)
    _print_counts(counts)
    _print(f"{options.count} programs, {time.process_time() - seconds:.0f} CPU s")
    for failure in failures[: options.shrink]:
        _print_failure(failure)
    return 1 if failures else 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


def _print_counts(counts: Counts) -> None:
    for (engine, word, kind), count in sorted(counts.items()):
        _print(f"{engine:14}{count:7}  {word}{f' ({kind})' if kind else ''}")


def _print_failure(failure: Failure) -> None:
    program, verdict = shrink(failure.program, failure.engine, failure.verdict)
    _print(f"\n# {failure.engine}: {verdict.word}: {verdict.detail}")
    _print(snippet(program, failure.engine))


if __name__ == "__main__":
    sys.exit(main())
