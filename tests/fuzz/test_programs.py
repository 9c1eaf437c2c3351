"""Random programs equal the plain step, bit for bit, or are refused with a reason."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import campaign
from tests.fuzz.check import ENGINES
from tests.fuzz.shrink import shrink, snippet

# A rule, so that nobody chooses: consecutive seeds, each engine its own hundred.
_FAST = {engine: range(100 * i, 100 * i + 30) for i, engine in enumerate(ENGINES)}


def hold(seeds: range, engine: str) -> None:
    """Check the programs of some seeds, and print the first failure minimised."""
    _, failures = campaign(seeds, [engine])
    if failures:
        first = failures[0]
        program, verdict = shrink(first.program, engine, first.verdict)
        shown = f"{verdict.word}: {verdict.detail}\n{snippet(program, engine)}"
        pytest.fail(f"{len(failures)} of {len(seeds)} programs; the first: {shown}")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_random_program_is_the_plain_program_under(engine: str) -> None:
    hold(_FAST[engine], engine)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", range(1000, 6000, 1000))
def test_each_of_a_thousand_programs_is_the_plain_program_under(
    first: int, engine: str
) -> None:
    hold(range(first, first + 1000), engine)
