"""Loops drawn at random keep their budget, and end in the plain loop's bits.

The peak is that of an allocator that shares nothing with `src`, around the whole loop.
"""

from __future__ import annotations

import pytest

from membudget.engine import native
from tests.field.counting_allocator import NoCompilerError, peak_bytes
from tests.loop.training import live_bytes
from tests.loops.held import check
from tests.loops.loop import drawn

FIRST, FEW, SOME, MANY = 100, 4, 60, 1000


@pytest.mark.cpu_only("the peak is counted by an allocator of the CPU")
@pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("seed", range(FIRST, FIRST + FEW))
def test_a_random_loop_keeps_its_budget_and_its_bits(seed):
    try:
        check(drawn(seed), peak_bytes, live_bytes, again=seed % 4 == 0)
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.mark.field  # They take minutes, as models of other libraries do.
@pytest.mark.cpu_only("the peak is counted by an allocator of the CPU")
@pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("seed", range(FIRST + FEW, FIRST + SOME))
def test_more_random_loops_keep_their_budgets_and_their_bits(seed):
    check(drawn(seed), peak_bytes, live_bytes, again=seed % 4 == 0)


@pytest.mark.slow
@pytest.mark.cpu_only("the peak is counted by an allocator of the CPU")
@pytest.mark.parametrize("seed", range(FIRST + SOME, FIRST + MANY))
def test_many_random_loops_keep_their_budgets_and_their_bits(seed):
    check(drawn(seed), peak_bytes, live_bytes, again=seed % 4 == 0)
