"""Segments of chains against every cut of small ones, and against a played step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membudget.errors import OptionError
from membudget.planner.segments import (
    Piece,
    equal_segments,
    extra_seconds,
    filled_segments,
    greedy_segments,
    optimal_segments,
    peak_bytes,
)

pieces = st.builds(
    Piece, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9).map(float)
)
chains = st.lists(pieces, min_size=1, max_size=8)


def every_cut(count: int, segments: int) -> Iterator[list[int]]:
    for inner in itertools.combinations(range(1, count), segments - 1):
        yield [0, *inner]


def played(chain: Sequence[Piece], starts: Sequence[int]) -> tuple[int, float]:
    """Play a step; return the most bytes alive at its pieces' ends, and the seconds."""
    bounds = [*starts, len(chain)]
    held: dict[str, int] = {}
    most, seconds = 0, 0.0
    for start in starts:
        held[f"input {start}"] = chain[start].input_bytes
    for segment in reversed(range(len(starts))):
        inside = range(bounds[segment], bounds[segment + 1])
        for index in inside:
            held[f"working {index}"] = chain[index].working_bytes
            most = max(most, sum(held.values()))
            if segment < len(starts) - 1:
                seconds += chain[index].seconds
        for index in reversed(inside):
            del held[f"working {index}"]
        del held[f"input {bounds[segment]}"]
    return most, seconds


@given(chains, st.data())
def test_peak_and_seconds_are_those_of_the_played_step(chain, data):
    inner = data.draw(
        st.sets(st.integers(1, len(chain) - 1)) if chain[1:] else st.none()
    )
    starts = [0, *sorted(inner or ())]
    assert (peak_bytes(chain, starts), extra_seconds(chain, starts)) == played(
        chain, starts
    )


@given(chains, st.data())
def test_the_optimal_cut_has_the_least_peak_of_all_cuts(chain, data):
    segments = data.draw(st.integers(1, len(chain)))
    found = optimal_segments(chain, segments)
    assert len(found) == segments
    least = min(peak_bytes(chain, cut) for cut in every_cut(len(chain), segments))
    assert peak_bytes(chain, found) == least


@given(chains, st.integers(0, 80))
def test_a_filled_segment_has_no_room_for_the_next_piece(chain, limit):
    starts = filled_segments(chain, limit)
    bounds = [*starts, len(chain)]
    for start, end in itertools.pairwise(bounds):
        inside = sum(piece.working_bytes for piece in chain[start:end])
        assert end > start
        assert inside <= limit or end - start == 1
        if end < len(chain):
            assert inside + chain[end].working_bytes > limit


@given(chains, st.integers(1, 20))
def test_the_greedy_cut_lies_between_the_best_and_no_cut(chain, tries):
    found = peak_bytes(chain, greedy_segments(chain, tries))
    best = min(
        peak_bytes(chain, optimal_segments(chain, k + 1)) for k in range(len(chain))
    )
    assert found >= best
    if tries > 1:
        assert found <= peak_bytes(chain, [0])


@given(st.integers(1, 200), st.data())
def test_equal_segments_differ_by_one_piece_at_most(count, data):
    segments = data.draw(st.integers(1, count))
    starts = equal_segments(count, segments)
    lengths = {b - a for a, b in itertools.pairwise([*starts, count])}
    assert len(starts) == segments
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 10_000))
def test_the_number_of_segments_is_the_root_of_the_number_of_pieces(count):
    assert len(equal_segments(count)) == round(math.sqrt(count))


@pytest.mark.parametrize("root", [2, 5, 10])
def test_root_segments_of_equal_pieces_need_twice_the_root(root):
    chain = [Piece(1, 1, 1.0)] * root**2
    starts = equal_segments(root**2)
    assert peak_bytes(chain, starts) == 2 * root
    assert extra_seconds(chain, starts) == root**2 - root


def test_optimal_segments_of_equal_pieces_shorten_towards_the_end():
    chain = [Piece(1, 1)] * 10
    assert optimal_segments(chain, 4) == [0, 4, 7, 9]
    # A triangle instead of a square: √(2n) instead of 2√n.
    assert peak_bytes(chain, [0, 4, 7, 9]) == 5
    assert peak_bytes(chain, equal_segments(10)) == 7


def test_a_large_input_is_not_where_a_segment_begins():
    chain = [Piece(1, 9), Piece(9, 1), Piece(1, 9), Piece(9, 1)]
    assert optimal_segments(chain, 2) == [0, 2]
    assert greedy_segments(chain) == [0, 2]


def test_one_segment_runs_nothing_again():
    chain = [Piece(1, 2, 3.0)] * 4
    assert extra_seconds(chain, [0]) == 0.0
    assert peak_bytes(chain, [0]) == 9


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 2, 1], [0, 3]])
def test_starts_that_do_not_cut_the_chain_are_refused(starts):
    chain = [Piece(1, 1)] * 3
    with pytest.raises(OptionError, match="stay below 3, the number of pieces"):
        peak_bytes(chain, starts)
    with pytest.raises(OptionError, match="ascend from 0"):
        extra_seconds(chain, starts)


@pytest.mark.parametrize("segments", [0, 4, -1])
def test_more_segments_than_pieces_are_refused(segments):
    message = f"3 pieces cannot be cut into {segments} segments"
    with pytest.raises(OptionError, match=message):
        optimal_segments([Piece(1, 1)] * 3, segments)
    with pytest.raises(OptionError, match=message):
        equal_segments(3, segments)


@pytest.mark.parametrize("cut", [greedy_segments, lambda chain: peak_bytes(chain, [0])])
def test_an_empty_chain_is_refused(cut):
    with pytest.raises(OptionError, match="0 pieces cannot be cut"):
        cut([])


def test_limits_tries_and_pieces_below_nothing_are_refused():
    with pytest.raises(OptionError, match="a limit is 0 bytes or more; got -2"):
        filled_segments([Piece(1, 1)], -2)
    with pytest.raises(OptionError, match="at least one try; got 0"):
        greedy_segments([Piece(1, 1)], 0)
    with pytest.raises(OptionError, match="a piece has 0 bytes and seconds or more"):
        Piece(1, -1)
