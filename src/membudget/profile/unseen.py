"""Find the bytes of a recorded step that are live in no recorded storage.

A recorder sees the tensors that operators read and make, and those that autograd packs.
`x * 0.5` also wraps the number in a tensor, which autograd saves without packing it: 8
bytes, live until the node of the product has run. A region frees none of them, so they
are part of the step under any plan. The allocator counts them, whatever they are:

    op index           0    1    2    3    4    5    6
    live, counted      0   20   48   56   40   28    0      as each operator begins
    of recorded ones   0   20   40   40   24   20    0
    unseen             0    0    8   16   16    8    0
    also just before   0    0    0    8   16    8    0      two storages of 8 bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from membudget.planner.timeline import Interval, live_bytes
from membudget.profile.lifetimes import RecordedStorage
from membudget.profile.step_recorder import StepRecorder


def note_unseen(recorder: StepRecorder, counted: Mapping[int, int]) -> None:
    """Note as storages what is live in no recorded one.

    What is live at one operator alone is left out: a number that its caller has wrapped
    is wrapped again under the recorder, and is part of the operator's workspace.

    Args:
        recorder: The recorder of a step.
        counted: Live bytes as each operator begins; empty if nobody counted them.
    """
    if not counted:
        return
    count, storages = len(recorder.operators), recorder.lifetimes.storages
    # What an operator makes is not there yet as it begins.
    made = ((s.birth + 1, s.death, s.bytes) for s in storages if s.birth >= 0)
    recorded = live_bytes(
        count, ((b, count if d is None else d, size) for b, d, size in made)
    )
    unseen = [counted.get(i, 0) - recorded[i] for i in range(count)]
    lasting = [max(0, min(pair)) for pair in pairwise([0, *unseen])]
    for birth, death, size in _ranges(lasting):
        storages.append(RecordedStorage(size, "activation", "", birth, death))


def _ranges(live: Sequence[int]) -> Iterator[Interval]:
    """Yield live ranges that add up to `live`: what was made last is freed first.

    Example:
        >>> list(_ranges([0, 8, 24, 8]))
        [(2, 3, 16), (1, 4, 8)]
    """
    held: list[tuple[int, int]] = []
    for moment, (before, now) in enumerate(pairwise([0, *live, 0])):
        if now > before:
            held.append((moment, now - before))
        while now < before:
            birth, size = held.pop()
            freed = min(size, before - now)
            yield birth, moment, freed
            if freed < size:
                held.append((birth, size - freed))
            before -= freed
