"""Simulation against hand, and against the meter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import membudget as mb
from membudget import policies
from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.choice import Choice
from membudget.planner.nested import peak_of_run
from membudget.planner.planner import Planner
from membudget.planner.simulate import (
    Simulation,
    live_at_peak,
    simulate,
    simulate_block,
)
from membudget.planner.timeline import timeline
from membudget.step import Step
from tests.oracles import CountedOperators
from tests.planner import models
from tests.planner.drafts import Draft, drafts, keeping, region_of
from tests.planner.models import Made, measured_peak


def two_saved() -> StepGraph:
    """a = f(x); b = g(a), which saves a; c = h(b), which saves b."""
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4], seconds=1.0)
    (b,) = draft.run(a, makes=[2], seconds=2.0)
    draft.save(a)
    draft.run(b, makes=[1], seconds=4.0)
    draft.save(b)
    return draft.finish(backward_s=0.0)


A, B = 1, 2


def test_a_step_without_regions_is_the_plain_timeline():
    graph = two_saved()
    found = simulate(graph, [])
    assert found == Simulation((4, 6, 7, 6, 4, 0), 7, 2, 7.0, ())
    assert timeline(graph).alive_bytes == found.alive_bytes


@pytest.mark.parametrize(
    ("kept", "alive", "peak", "again"),
    [
        # c's backward wants b: f and g run; a stays for g's backward.
        (set(), (4, 6, 3, 6, 4, 0), 6, (0, 1)),
        ({A}, (4, 6, 7, 6, 4, 0), 7, (1,)),
        ({B}, (4, 6, 3, 2, 4, 0), 6, (0,)),
        ({A, B}, (4, 6, 7, 6, 4, 0), 7, ()),
    ],
    ids=["nothing", "a", "b", "both"],
)
def test_what_is_dropped_is_made_when_the_backward_asks(kept, alive, peak, again):
    graph = two_saved()
    found = simulate(graph, [Choice(0, 3, frozenset(kept))])
    seconds = graph.seconds + sum(graph.operators[i].seconds for i in again)
    assert found.alive_bytes == alive
    assert found.peak_bytes == peak
    assert found.recomputed == again
    assert found.seconds == seconds


@pytest.mark.parametrize(
    ("run", "to_end", "workspace", "peak"),
    [
        ([0, 1, 2], set(), 0, 6),
        ([0, 1, 2], {A}, 0, 7),
        ([0, 1, 2], {A, B}, 0, 7),
        ([0, 1, 2], {B}, 0, 6),
        ([0, 1, 2], set(), 2, 8),
        # What another operator makes is there already.
        ([1, 2], {A}, 0, 3),
        ([2], set(), 5, 6),
        ([], set(), 0, 0),
    ],
)
def test_the_peak_of_a_run_is_of_what_it_makes_until_its_last_use(
    run, to_end, workspace, peak
):
    graph = two_saved()
    operators = tuple(replace(o, workspace_bytes=workspace) for o in graph.operators)
    touched = {0: (A,), 1: (A, B), 2: (B, 3)}
    found = peak_of_run(replace(graph, operators=operators), run, touched, to_end)
    assert found == peak


def test_the_output_of_one_region_stays_as_the_source_of_the_next():
    # g saved a in the second region, which did not make it: a stays.
    found = simulate(two_saved(), [Choice(0, 1), Choice(1, 3)])
    assert found.recomputed == (1,)
    assert found.alive_bytes == (4, 6, 7, 6, 4, 0)


def test_the_workspace_of_what_runs_again_counts():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4], workspace=10)
    draft.save(a)
    (b,) = draft.run(a, makes=[8])
    draft.hold(b)
    found = simulate(draft.finish(), [Choice(0, 2)])
    assert found.recomputed == (0,)
    # While it runs again, the output is there, too: 8 + 4 + 10 bytes, not 4 + 10.
    assert (found.peak_bytes, found.peak_moment) == (22, 3)
    assert found.alive_bytes == (4, 12, 8, 12)


def test_what_is_yet_to_be_read_is_copied_for_autograd():
    # The backward asks for a first, and b, made from a, is still to come.
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    (b,) = draft.run(a, makes=[2])
    draft.save(b)
    draft.run(a, b, makes=[1])
    draft.save(a)
    found = simulate(draft.finish(), [Choice(0, 3)])
    assert found.alive_bytes == (4, 6, 7, 8, 2, 0)
    assert found.recomputed == (0, 1)


def test_an_output_that_nobody_wants_is_alive_only_while_its_operator_runs():
    draft = Draft()
    a, _ = draft.run(draft.outside(), makes=[4, 100])
    draft.run(a, makes=[1])
    draft.save(a)
    draft.run(makes=[50])
    found = simulate(draft.finish(), [Choice(0, 3)])
    assert found.alive_bytes == (104, 5, 50, 0, 4, 0)
    assert found.peak_bytes == 104


def test_a_storage_that_is_written_in_place_is_made_by_all_its_writers():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    (b,) = draft.run(writes=[a])
    draft.run(b, makes=[1])
    draft.save(b)
    assert simulate(draft.finish(), [Choice(0, 3)]).recomputed == (0, 1)


def test_what_was_read_before_a_write_is_made_without_the_write():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[2])
    (b,) = draft.run(a, makes=[2])
    draft.run(writes=[a])
    draft.run(b, makes=[1])
    draft.save(b)
    assert simulate(draft.finish(), [Choice(0, 4)]).recomputed == (0, 1)


def test_what_is_overwritten_stays_for_operators_that_have_yet_to_read_it():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(*draft.run(a, makes=[1]))
    (a,) = draft.run(writes=[a])
    draft.save(*draft.run(a, makes=[2]))
    found = simulate(draft.finish(), [Choice(0, 4)])
    assert found.replayed == (0, 2, 3, 1)
    # Once the last operator has run again: its output, and `a` as it was.
    assert found.alive_bytes[4:] == (2 + 4, 4, 1, 0)


def test_a_view_costs_nothing_and_keeps_its_storage():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    view = draft.view(a)
    draft.run(view, makes=[1])
    draft.save(view)
    found = simulate(draft.finish(), [Choice(0, 3)])
    assert found.recomputed == (0,)


def test_what_the_user_holds_is_neither_dropped_nor_made_again():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.run(a, makes=[1])
    draft.save(a)
    draft.hold(a)
    graph = draft.finish()
    found = simulate(graph, [Choice(0, 2)])
    assert found.recomputed == ()
    assert found.alive_bytes == simulate(graph, []).alive_bytes


@pytest.mark.parametrize(
    "regions",
    [
        [Choice(0, 2), Choice(1, 3)],
        [Choice(0, 4)],
        [Choice(2, 1)],
        [Choice(-1, 2)],
    ],
    ids=["overlap", "into-the-backward", "reversed", "negative"],
)
def test_regions_that_overlap_or_leave_the_forward_are_refused(regions):
    with pytest.raises(OptionError, match="overlaps the one before it or leaves"):
        simulate(two_saved(), regions)


@settings(max_examples=60, deadline=None)
@given(drafts(pinned=False))
def test_no_operator_runs_again_twice_and_none_of_the_backward_does(graph):
    count = graph.backward_start
    again = simulate(graph, [Choice(0, count)]).recomputed
    assert len(set(again)) == len(again)
    assert all(0 <= index < count for index in again)


@settings(max_examples=60, deadline=None)
@given(drafts(pinned=False))
def test_nothing_is_alive_after_the_step(graph):
    middle = graph.backward_start // 2
    regions = [Choice(0, middle), Choice(middle, graph.backward_start)]
    assert simulate(graph, regions).alive_bytes[-1] == 0


@settings(max_examples=60, deadline=None)
@given(drafts(pinned=False))
def test_a_region_alone_and_the_rest_add_up_to_the_step(graph):
    """Where nothing outside was made, the region alone is the whole step."""
    region = Choice(0, graph.backward_start)
    whole = simulate(graph, [region]).alive_bytes
    alone = simulate_block(graph, region)
    for start, alive in zip(alone.starts, alone.alive_bytes, strict=True):
        assert alive == whole[start]


def listed_bytes(graph: StepGraph, choices: list[Choice]) -> int:
    """Return the bytes of what is listed as live at the peak."""
    found = live_at_peak(graph, choices)
    alive = sum(graph.storages[storage].bytes for storage in found.storages)
    return alive + graph.operators[found.operator].workspace_bytes


@settings(max_examples=200, deadline=None)
@given(drafts(), st.sets(st.integers(0, 7)), st.sampled_from(["replay", "rerun"]))
def test_what_is_live_at_the_peak_adds_up_to_it(graph, kept, engine):
    middle, end = graph.backward_start // 2, graph.backward_start
    held = frozenset() if engine == "rerun" else frozenset(kept)
    for choices in (
        [],
        [Choice(0, end, held, engine=engine)],
        [Choice(middle, end, held, engine=engine), Choice(0, middle)],
    ):
        assert listed_bytes(graph, choices) == simulate(graph, choices).peak_bytes


@pytest.mark.parametrize("name", ["gpt", "unet", "tied_weights", "lstm_tagger"])
def test_what_is_live_at_the_peak_of_a_model_adds_up_to_it(name):
    graph = mb.profile(*models.MODELS[name](), fake=True).graph
    smallest = Planner(graph).smallest()
    for choices in ([], list(smallest.choices)):
        assert listed_bytes(graph, choices) == simulate(graph, choices).peak_bytes


# Beside the meter.

MATMULS = ("aten.addmm.default", "aten.mm.default", "aten.bmm.default")
CONVOLUTIONS = ("aten.convolution.default", "aten.mkldnn_convolution.default")
KEEPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing": (policies.nothing, ()),
    "matmuls": (policies.matmuls, MATMULS),
    "convolutions": (policies.convolutions, CONVOLUTIONS),
}


def _whole(make: Callable[[], Made]) -> Callable[[], Made]:
    def made() -> Made:
        model, batch = make()
        return models.Calls(lambda self, x: self.body(x), body=model), batch

    return made


BLOCKS: dict[str, tuple[Callable[[], Made], list[str]]] = {
    "mlp": (models.mlp, [str(i) for i in range(6)]),
    "gpt": (models.gpt, [str(i) for i in range(1, 5)]),
    "resnet": (models.resnet, [str(i) for i in range(1, 5)]),
    "whole mlp": (_whole(models.mlp), ["body"]),
    "whole gpt": (_whole(models.gpt), ["body"]),
    "whole resnet": (_whole(models.resnet), ["body"]),
}
IN_PLACE: dict[str, tuple[Callable[[], Made], list[str]]] = {
    "into convolutions": (models.convolutions_in_place, ["1", "2", "3"]),
    "whole into convolutions": (_whole(models.convolutions_in_place), ["body"]),
    "in place": (models.resnet_in_place, [str(i) for i in range(1, 5)]),
    "whole in place": (_whole(models.resnet_in_place), ["body"]),
}
CASES = [
    *((name, keep) for name in BLOCKS for keep in ("nothing", "matmuls")),
    *(
        (name, keep)
        for name in ("resnet", "whole resnet", *IN_PLACE)
        for keep in ("nothing", "convolutions")
    ),
]


def simulated_and_model(name: str, keep: str) -> tuple[StepGraph, Simulation, Made]:
    make, paths = (BLOCKS | IN_PLACE)[name]
    model, batch = make()
    graph = mb.profile(model, batch).graph
    _, operators = KEEPS[keep]
    regions = [keeping(graph, region_of(graph, path), operators) for path in paths]
    found = simulate(graph, regions)
    mb.apply(model, names=paths, engine="replay", keep=KEEPS[keep][0], verify=False)
    return graph, found, (model, batch)


@pytest.mark.parametrize(("name", "keep"), sorted(set(CASES)))
def test_the_simulated_peak_is_the_measured_one_within_a_hundredth(name, keep):
    _, found, made = simulated_and_model(name, keep)
    assert found.peak_bytes == pytest.approx(measured_peak(*made), rel=0.01)


# Guards copy buffers and states; an `empty_like` is replayed as an `empty_strided`. A
# replayed normalisation updates zeros in place of its statistics.
OWN = {"clone", "copy_", "empty_like", "empty_strided", "zero_"}
VIEWS = {"t", "transpose", "permute", "expand", "view", "slice", "select"} | {
    "_unsafe_view",
    "detach",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "alias",
    "as_strided",
}


def counted(model: Any, batch: Any) -> Counter[str]:
    step = Step(model, batch, None)
    step.run()
    step.prepare()
    with CountedOperators() as counting:
        step.run()
    step.prepare()
    return Counter({n: k for n, k in counting.counts.items() if n not in VIEWS | OWN})


@pytest.mark.parametrize(("name", "keep"), sorted(set(CASES)))
def test_the_operators_that_run_again_are_those_of_the_simulation(name, keep):
    graph, found, (model, batch) = simulated_and_model(name, keep)
    with mb.disable_checkpointing():
        plain = counted(model, batch)
    more = counted(model, batch)
    more.subtract(plain)
    expected = Counter(
        graph.operators[index].name.split(".")[1]
        for index in found.recomputed
        if not graph.operators[index].is_view
    )
    assert +more == Counter({n: k for n, k in expected.items() if n not in OWN})
