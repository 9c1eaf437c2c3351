"""A chain of blocks becomes the stages of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from membudget.attach import carried_by
from membudget.errors import OptionError
from membudget.pipeline import split
from membudget.pipeline.split import parts_of
from membudget.planner.pipeline_cuts import equal_sizes
from tests.pipeline.models import chain

pytestmark = [pytest.mark.cpu_only("gloo"), pytest.mark.usefixtures("alone")]


def test_stages_hold_their_blocks_under_the_names_of_the_whole_chain() -> None:
    whole = nn.Sequential(*chain(5))
    first, second = split(whole, "Interleaved1F1B")
    assert [name for name, _ in first.submod.named_children()] == ["0", "1", "2"]
    parts = first.submod.state_dict() | second.submod.state_dict()
    assert parts.keys() == whole.state_dict().keys()
    assert all(torch.equal(parts[name], t) for name, t in whole.state_dict().items())


def test_every_block_gets_a_region_by_default() -> None:
    for stage in split(chain(4), "Interleaved1F1B"):
        assert stage.applied is not None
        names = tuple(name for name, _ in stage.submod.named_children())
        assert stage.applied.names == names


def test_regions_go_to_the_blocks_that_are_named() -> None:
    blocks = chain(4)
    first, second = split(blocks, "Interleaved1F1B", recomputed=[[1], []])
    assert [carried_by(block) is not None for block in blocks] == [
        False,
        True,
        False,
        False,
    ]
    assert first.applied is not None
    assert second.applied is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": [2, 3]}, r"add up to the 4 blocks; got \[2, 3\], together 5"),
        ({"sizes": [4, 0]}, r"whole numbers from 1 that add up"),
        ({"sizes": [1, 1, 2]}, "sizes names 3 stages, and 1 ranks of 2 have 2"),
        ({"recomputed": [[0]]}, "recomputed names 1 stages, and the pipeline has 2"),
        ({"recomputed": [[], [2]]}, r"the blocks \[2\] of stage 1, which has 2"),
        (
            {"stages_per_rank": 5},
            "5 stages need at least as many blocks; the chain has 4",
        ),
    ],
)
def test_splits_that_do_not_fit_the_chain_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        split(chain(4), "Interleaved1F1B", **options)


def test_unknown_schedules_are_refused_before_anything_moves() -> None:
    with pytest.raises(OptionError, match=r"schedule is one of .* got 'none'"):
        split(chain(4), "none")


def test_larger_stages_come_first() -> None:
    assert equal_sizes(7, 3) == (3, 2, 2)
    assert parts_of("abcdefg", [3, 2, 2]) == ["abc", "de", "fg"]
