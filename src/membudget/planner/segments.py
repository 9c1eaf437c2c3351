"""Segments of a chain, each with only its input kept: the classic plans.

The problem: pieces run one after another; a segment is a run of them of which the
forward keeps the input only, and which its backward runs again (Chen, Xu, Zhang,
Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost"). A segment's input lives
from the forward to the end of the segment's backward, what lies inside only during that
backward; the peak falls in the backward of some segment j, beside the inputs of the
segments up to it:

    peak = max over j of  Σ input_bytes(start of i)   over i ≤ j
                        + Σ working_bytes(p)          over the pieces p in j

The last segment's backward follows its forward at once, so it alone is not run again.
For the least peak with k segments let least(k, a) be that of the pieces from a on,
without what is held before them; all of it moves up by the input of piece a:

    least(1, a) = input(a) + working(a, n)
    least(k, a) = input(a) + min over b > a of max(working(a, b), least(k − 1, b))

Parameters, gradients and what a single operator needs while it runs are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from membudget.errors import OptionError


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the chain.

    Attributes:
        input_bytes: Of what it reads from the piece before it.
        working_bytes: What it leaves for its own backward when it runs, without its
            input; its output, which is the next piece's input, is in it.
        seconds: What its forward takes.
    """

    input_bytes: int
    working_bytes: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is less than nothing."""
        if min(self.input_bytes, self.working_bytes, self.seconds) < 0:
            raise OptionError(f"a piece has 0 bytes and seconds or more; got {self}")


def peak_bytes(chain: Sequence[Piece], starts: Sequence[int]) -> int:
    """Return the most bytes alive at once.

    Args:
        chain: The pieces, in the order of the forward.
        starts: The first piece of each segment: ascending, the first of them 0.

    Raises:
        OptionError: If `starts` does not cut the chain into segments.

    Example:
        >>> chain = [Piece(input_bytes=1, working_bytes=4)] * 6
        >>> peak_bytes(chain, [0]), peak_bytes(chain, [0, 2, 4])
        (25, 11)
    """
    held = most = 0
    for start, end in _segments(chain, starts):
        held += chain[start].input_bytes
        inside = sum(piece.working_bytes for piece in chain[start:end])
        most = max(most, held + inside)
    return most


def extra_seconds(chain: Sequence[Piece], starts: Sequence[int]) -> float:
    """Return the seconds of what runs again: every segment but the last.

    Args:
        chain: The pieces, in the order of the forward.
        starts: The first piece of each segment.

    Raises:
        OptionError: If `starts` does not cut the chain into segments.
    """
    segments = _segments(chain, starts)
    return math.fsum(piece.seconds for piece in chain[: segments[-1][0]])


def equal_segments(count: int, segments: int | None = None) -> list[int]:
    """Return the starts of segments whose lengths differ by one at most.

    Args:
        count: How many pieces there are.
        segments: How many segments; `None` for √count, rounded to the nearest.

    Raises:
        OptionError: If there are fewer pieces than segments, or none.

    Example:
        >>> equal_segments(9), equal_segments(8, 2)
        ([0, 3, 6], [0, 4])
    """
    _check_count(count, 1)
    if segments is None:
        root = math.isqrt(count)
        segments = root if count <= root * (root + 1) else root + 1
    _check_count(count, segments)
    return [index * count // segments for index in range(segments)]


def filled_segments(chain: Sequence[Piece], limit_bytes: int) -> list[int]:
    """Return segments that are each filled until they exceed a limit.

    A piece whose bytes would bring a segment above the limit begins the next one; a
    piece that alone exceeds it is a segment by itself.

    Args:
        chain: The pieces.
        limit_bytes: The most working bytes of a segment.

    Raises:
        OptionError: If there are no pieces, or the limit is negative.

    Example:
        >>> filled_segments([Piece(1, 4)] * 5, 8)
        [0, 2, 4]
    """
    _check_count(len(chain), 1)
    if limit_bytes < 0:
        raise OptionError(f"a limit is 0 bytes or more; got {limit_bytes:,}")
    starts, inside = [0], 0
    for index, piece in enumerate(chain):
        if index > starts[-1] and inside + piece.working_bytes > limit_bytes:
            starts.append(index)
            inside = 0
        inside += piece.working_bytes
    return starts


def greedy_segments(chain: Sequence[Piece], tries: int = 64) -> list[int]:
    """Return the filled segments with the least peak among several limits.

    The limits lie in equal ratios between the largest piece and the whole chain. Chen
    et al. look around √(total · kept); the ratios cover that and need no first guess.

    Args:
        chain: The pieces.
        tries: How many limits.

    Raises:
        OptionError: If there are no pieces, or no tries.
    """
    _check_count(len(chain), 1)
    if tries < 1:
        raise OptionError(f"a search needs at least one try; got {tries}")
    low = max(1, max(piece.working_bytes for piece in chain))
    ratio = max(1.0, sum(piece.working_bytes for piece in chain) / low)
    limits = [math.ceil(low * ratio ** (i / max(1, tries - 1))) for i in range(tries)]
    found = [filled_segments(chain, limit) for limit in sorted(set(limits))]
    return min(found, key=lambda starts: (peak_bytes(chain, starts), len(starts)))


def optimal_segments(chain: Sequence[Piece], segments: int) -> list[int]:
    """Return the cut into a number of segments that has the least peak.

    The programme of the module's head, in O(segments · n²).

    Args:
        chain: The pieces.
        segments: How many segments, exactly.

    Raises:
        OptionError: If there are fewer pieces than segments, or none.

    Example:
        >>> optimal_segments([Piece(1, 4)] * 6, 3)
        [0, 2, 4]
    """
    count = len(chain)
    _check_count(count, segments)
    before = [0, *accumulate(piece.working_bytes for piece in chain)]
    least = [chain[i].input_bytes + before[-1] - before[i] for i in range(count)]
    cuts: list[list[int]] = []
    for done in range(1, segments):
        # `done` segments need as many pieces behind the cut.
        rows = [
            min(
                (max(before[cut] - before[start], least[cut]), cut)
                for cut in range(start + 1, count - done + 1)
            )
            for start in range(count - done)
        ]
        cuts.append([cut for _, cut in rows])
        least = [chain[i].input_bytes + most for i, (most, _) in enumerate(rows)]
    starts = [0]
    for of_start in reversed(cuts):
        starts.append(of_start[starts[-1]])
    return starts


def _segments(chain: Sequence[Piece], starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return first piece and first piece after of each segment."""
    _check_count(len(chain), 1)
    bounds = [*starts, len(chain)]
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise OptionError(
            f"the starts of segments ascend from 0 and stay below {len(chain)}, the "
            f"number of pieces; got {list(starts)}"
        )
    return list(pairwise(bounds))


def _check_count(pieces: int, segments: int) -> None:
    if not 1 <= segments <= pieces:
        raise OptionError(
            f"{pieces} pieces cannot be cut into {segments} segments: a segment has at "
            "least one piece, and there is at least one segment"
        )
