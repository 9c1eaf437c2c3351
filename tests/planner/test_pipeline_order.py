"""What each rank of a pipeline does, in which order."""

from __future__ import annotations

import pytest

from membudget.errors import OptionError
from membudget.planner.pipeline_order import (
    PipelineAction,
    checked_modes,
    drops,
    gpipe,
    one_forward_one_backward,
    with_checkpoint,
)
from tests.planner.pipelines import order_of

SIZES = [(1, 1), (2, 1), (2, 5), (4, 2), (4, 8)]
MAKERS = pytest.mark.parametrize("maker", [gpipe, one_forward_one_backward])


@MAKERS
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_micro_batch_runs_once_each_way_on_every_stage(
    maker, stages: int, micro_batches: int
) -> None:
    made = maker(stages, micro_batches)
    assert list(made) == list(range(stages))
    for stage, actions in made.items():
        assert sorted(actions) == sorted(
            PipelineAction(kind, stage, number)
            for kind in ("forward", "backward")
            for number in range(micro_batches)
        )


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_1f1b_holds_as_many_micro_batches_as_stages_follow(
    stages: int, micro_batches: int
) -> None:
    order = order_of("1F1B", stages, micro_batches)
    held = [order.most_in_flight(stage) for stage in range(stages)]
    assert held == [min(stages - stage, micro_batches) for stage in range(stages)]


def test_gpipe_holds_all_micro_batches() -> None:
    assert order_of("GPipe", 3, 7).most_in_flight(2) == 7


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_all_but_the_last_stage_recompute_ahead(name: str) -> None:
    order = order_of(name, 3, 4)
    expected = {(stage, number) for stage in range(2) for number in range(4)}
    assert order.recomputed_ahead == expected
    for actions in order.ranks:
        kinds = [action.kind for action in actions]
        after = [kinds[i + 1] for i, kind in enumerate(kinds) if kind == "recompute"]
        assert set(after) <= {"backward"}


def test_the_last_micro_batch_may_keep_its_activations() -> None:
    order = order_of("1F1B", 2, 3, checkpoint="except_last")
    assert order.recomputed_ahead == {(0, 0), (0, 1)}
    assert [drops("except_last", number, 3) for number in range(3)] == [
        True,
        True,
        False,
    ]


def test_modes_may_differ_between_stages() -> None:
    order = order_of("1F1B", 3, 2, checkpoint=["always", "never", "always"])
    assert order.recomputed_ahead == {(0, 0), (0, 1)}
    changed = with_checkpoint(order, ["never", "always", "never"])
    assert changed.recomputed_ahead == {(1, 0), (1, 1)}
    assert with_checkpoint(changed, order.checkpoint) == order


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"checkpoint is one of 'always'.*got 'sometimes'"
    ):
        checked_modes("sometimes", 2)  # type: ignore[arg-type]


def test_modes_for_other_stages_are_refused() -> None:
    with pytest.raises(OptionError, match="names 1 stages, and the pipeline has 2"):
        checked_modes(["always"], 2)
