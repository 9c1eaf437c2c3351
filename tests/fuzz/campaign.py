"""Many programs under every engine, and the count of the verdicts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.fuzz.check import Record, Verdict, check, plain
from tests.fuzz.draw import draw
from tests.fuzz.program import Program
from tests.fuzz.statements import KINDS, Kind

# By engine, verdict and the kind of that.
Counts = Counter[tuple[str, str, str]]


@dataclass(frozen=True)
class Failure:
    """A program that an engine does not run as the plain step does."""

    program: Program
    engine: str
    verdict: Verdict


def campaign(
    seeds: Iterable[int], engines: Sequence[str], kinds: Sequence[Kind] = KINDS
) -> tuple[Counts, list[Failure]]:
    """Check the program of each seed under each engine.

    Args:
        seeds: The seeds.
        engines: The engines, by name.
        kinds: What the statements are drawn from.

    Returns:
        How often each engine came to each verdict, and the failures.
    """
    counts: Counts = Counter()
    failures = []
    for seed in seeds:
        program, expected = drawn(seed, kinds)
        for engine in engines:
            verdict = check(program, engine, expected)
            counts[engine, verdict.word, verdict.kind] += 1
            if verdict.is_failure:
                failures.append(Failure(program, engine, verdict))
    return counts, failures


def drawn(seed: int, kinds: Sequence[Kind] = KINDS) -> tuple[Program, Record]:
    """Draw a program, mostly one that the plain step can run, and run that."""
    tries = random.Random(seed)
    number = seed * 1000
    while True:
        program = draw(number, kinds)
        expected = plain(program)
        if expected.error is None or tries.random() < 0.03:
            return program, expected
        number += 1
