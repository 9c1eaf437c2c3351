"""Plans as files: what is written is read, and what is not whole is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.errors import OptionError, PlanError
from membudget.planner.choice import Choice, Stage
from membudget.planner.loop_plan import LoopPlan, SituationPlan
from membudget.planner.plan import (
    NO_HOST,
    VERSION,
    HostPlan,
    KeptOutput,
    Plan,
    RegionPlan,
    StagePlan,
    parameter_differences,
    parameter_text,
)
from membudget.planner.region_plans import region_plan
from tests.planner.drafts import PLAN, Draft, chain_of

sizes = st.integers(-(1 << 62), 1 << 62)
texts = st.text(st.characters(codec="utf-8"), max_size=9)
kept_outputs = st.builds(KeptOutput, sizes, sizes, texts)
outputs = st.lists(kept_outputs, max_size=3).map(tuple)
stages = st.builds(StagePlan, sizes, sizes, outputs)
regions = st.builds(
    RegionPlan,
    *(texts, sizes, outputs, st.lists(stages, max_size=3).map(tuple), sizes),
    st.lists(sizes, max_size=3).map(tuple),
)
floats = st.floats(allow_nan=False, allow_infinity=False)
situations = st.builds(
    SituationPlan,
    *(texts, st.lists(sizes, max_size=3).map(tuple), texts, sizes, sizes, sizes),
    *(floats, sizes, sizes, sizes, sizes),
)
loops = st.builds(
    LoopPlan,
    *(texts, st.lists(texts, max_size=2).map(tuple), texts, texts, texts),
    *(st.lists(situations, max_size=2).map(tuple), texts),
)
plans = st.builds(
    Plan,
    *(
        texts,
        st.lists(texts, max_size=2).map(tuple),
        sizes,
        sizes,
        sizes,
        floats,
        floats,
        texts,
    ),
    st.lists(regions, max_size=3).map(tuple),
    texts,
    st.lists(loops, max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_a_plan_that_is_written_and_read_is_the_same(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_is_read_from_a_file_by_its_path_or_its_name(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    assert Plan.from_json(path) == PLAN
    assert Plan.from_json(str(path)) == PLAN


def test_a_plan_writes_its_file_whole(tmp_path: Path):
    path = tmp_path / "plan.json"
    text = PLAN.to_json(path)
    assert path.read_text() == f"{text}\n"
    with pytest.raises(OptionError, match="the plan cannot be written"):
        PLAN.to_json(tmp_path / "nowhere" / "plan.json")


def test_the_file_says_its_version():
    assert json.loads(PLAN.to_json())["version"] == VERSION


def test_whole_numbers_are_read_as_seconds_and_ratios():
    data = json.loads(PLAN.to_json()) | {"slowdown": 2}
    assert Plan.from_dict(data).slowdown == 2.0


def test_no_half_of_a_file_is_read(tmp_path: Path):
    text = PLAN.to_json()
    path = tmp_path / "half.json"
    for end in range(0, len(text) - 1, 13):
        path.write_text(text[:end])
        with pytest.raises(PlanError, match="cannot be read"):
            Plan.from_json(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"plan"'])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match="plan must be an object; it is a"):
        Plan.from_json(path)


def test_a_file_that_is_not_there_is_refused_with_its_name(tmp_path: Path):
    with pytest.raises(PlanError, match=r"cannot be read: .*missing\.json"):
        Plan.from_json(tmp_path / "missing.json")


def test_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.from_json(tmp_path)
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.from_json(path)


def test_a_plan_of_version_6_moves_nothing_to_the_host():
    data = PLAN.to_dict() | {"version": 6}
    del data["host"]
    for region in data["regions"]:
        del region["offloaded"]
    assert Plan.from_dict(json.loads(json.dumps(data))) == PLAN
    assert PLAN.host == NO_HOST


@pytest.mark.parametrize("region", [5, None, [], "text", [["path", 1]]])
def test_a_region_of_version_6_that_is_no_object_is_refused(region):
    data = PLAN.to_dict() | {"version": 6, "regions": [region]}
    with pytest.raises(PlanError, match=r"plan\.regions\[0\] must be an object"):
        Plan.from_dict(data)


def test_what_is_moved_to_the_host_is_named_and_read_again():
    graph = chain_of([4, 4, 4], [1.0, 1.0, 1.0])
    moved = Choice(0, 3, frozenset({1, 2}), offloaded=frozenset({1}))
    region = region_plan(graph, "0", moved)
    assert [(k.number, k.output) for k in region.offloaded] == [(1, 0)]
    assert set(region.offloaded) < set(region.kept)
    host = HostPlan(4096, 512, 3072, 0.5, 0.25)
    plan = dataclasses.replace(PLAN, regions=(region,), host=host)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_newer_version_is_refused():
    data = PLAN.to_dict() | {"version": VERSION + 1}
    with pytest.raises(
        PlanError, match=f"and {VERSION}; this one has version {VERSION + 1}"
    ):
        Plan.from_dict(data)


Change = Callable[[dict[str, Any]], Any]


def _kept(data: dict[str, Any]) -> Any:
    return data["regions"][0]["kept"][0]


def _set(where: Callable[[dict[str, Any]], Any], name: str, value: Any) -> Change:
    return lambda data: where(data).__setitem__(name, value)


def _drop(where: Callable[[dict[str, Any]], Any], name: str) -> Change:
    return lambda data: where(data).pop(name)


def _top(data: dict[str, Any]) -> Any:
    return data


def _region(data: dict[str, Any]) -> Any:
    return data["regions"][1]


WRONG: dict[str, tuple[Change, str]] = {
    "version-text": (_set(_top, "version", "1"), r"plan\.version must be int; it is"),
    "version-true": (_set(_top, "version", True), r"plan\.version must be int"),
    "budget-text": (_set(_top, "budget_bytes", "8"), r"plan\.budget_bytes must be int"),
    "budget-float": (_set(_top, "budget_bytes", 8.5), r"plan\.budget_bytes must be"),
    "slowdown-null": (_set(_top, "slowdown", None), r"plan\.slowdown must be float"),
    "slowdown-bool": (_set(_top, "slowdown", True), r"plan\.slowdown must be float"),
    "model-number": (_set(_top, "model", 3), r"plan\.model must be str; it is 3"),
    "regions-object": (_set(_top, "regions", {}), r"plan\.regions must be list"),
    "region-list": (_set(_top, "regions", [[]]), r"plan\.regions\[0\] must be an obj"),
    "path-null": (_set(_region, "path", None), r"plan\.regions\[1\]\.path must be str"),
    "number-text": (
        _set(_kept, "number", "1"),
        r"plan\.regions\[0\]\.kept\[0\]\.number must be int; it is '1'",
    ),
    "kept-of-numbers": (
        _set(_region, "kept", [1]),
        r"plan\.regions\[1\]\.kept\[0\] must be an object; it is a int",
    ),
}
# Plans of an earlier day do not say for which device they are, nor of loops.
REQUIRED = [name for name in PLAN.to_dict() if name not in ("device", "loops")]

MISSING: dict[str, tuple[Change, str]] = {
    **{name: (_drop(_top, name), rf"plan\.{name}") for name in REQUIRED},
    **{
        f"region-{name}": (_drop(_region, name), rf"plan\.regions\[1\]\.{name}")
        for name in ("path", "operators", "kept")
    },
    **{
        f"kept-{name}": (_drop(_kept, name), rf"plan\.regions\[0\]\.kept\[0\]\.{name}")
        for name in ("number", "output", "operator")
    },
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_has_a_wrong_type_is_refused_with_its_place(change, message):
    data = json.loads(PLAN.to_json())
    change(data)
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(data)


@pytest.mark.parametrize(("change", "message"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_named_with_its_place(change, message):
    data = json.loads(PLAN.to_json())
    change(data)
    with pytest.raises(PlanError, match=message + " is missing: the plan is not whole"):
        Plan.from_dict(data)


def test_a_plan_that_names_no_device_and_no_loop_is_read():
    data = PLAN.to_dict()
    del data["device"], data["loops"]
    assert Plan.from_dict(data) == dataclasses.replace(PLAN, device="")


def test_what_to_dict_returns_is_read():
    assert Plan.from_dict(PLAN.to_dict()) == PLAN


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_ratios_that_are_no_numbers_are_refused(number):
    text = PLAN.to_json().replace("1.25", number)
    with pytest.raises(PlanError, match=r"plan"):
        Plan.from_json(text)


def test_outputs_are_named_by_their_number_in_the_region_and_place():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    b, c = draft.run(a, makes=[1, 1])
    draft.save(b, c)
    draft.view(c)
    graph = draft.finish()
    kept = frozenset(draft.values[v].storage for v in (b, c))
    found = region_plan(graph, "h", Choice(1, 3, kept))
    assert found.path == "h"
    assert found.operators == 2
    assert [(k.number, k.output) for k in found.kept] == [(1, 0), (1, 1)]
    assert found.kept[0].operator == "test.forward"


def test_a_storage_is_kept_as_its_last_writer_leaves_it():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    draft.save(*draft.run(writes=[a]))
    graph = draft.finish()
    found = region_plan(graph, "h", Choice(0, 2, frozenset({1})))
    assert [k.number for k in found.kept] == [2]


def test_a_writer_of_two_storages_is_named_for_that_which_was_not_saved_before():
    draft = Draft()
    a, b = draft.run(draft.outside(), makes=[1, 1])
    draft.save(a)
    _, written = draft.run(writes=[a, b])
    draft.save(written)
    graph = draft.finish()
    kept = frozenset(draft.values[v].storage for v in (a, b))
    found = region_plan(graph, "h", Choice(0, 2, kept))
    assert [(k.number, k.output) for k in found.kept] == [(1, 0), (2, 1)]


def test_outputs_are_listed_in_the_order_of_their_operators():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    (b,) = draft.run(draft.outside(), makes=[1])
    draft.save(b)
    draft.save(*draft.run(writes=[a]))
    graph = draft.finish()
    kept = frozenset(draft.values[v].storage for v in (a, b))
    found = region_plan(graph, "h", Choice(0, 3, kept))
    assert [(k.number, k.output) for k in found.kept] == [(2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("digits", "says"),
    [
        ((1 << 63) - 1, None),
        (-(1 << 63) + 1, None),
        (1 << 63, "must be less than 2\\*\\*63; it has more digits"),
        (-(1 << 63), "must be less than 2\\*\\*63; it has more digits"),
    ],
)
@pytest.mark.parametrize("name", ["budget_bytes", "slowdown"])
def test_numbers_of_up_to_63_bits_are_read(name, digits, says):
    data = PLAN.to_dict() | {name: digits}
    if says is None:
        assert getattr(Plan.from_dict(data), name) == pytest.approx(digits, rel=1e-15)
        return
    with pytest.raises(PlanError, match=rf"plan\.{name} {says}"):
        Plan.from_dict(data)


def test_what_is_shown_of_a_wrong_value_is_short():
    with pytest.raises(
        PlanError, match=rf"plan\.model must be str; it is \['{'x' * 38}$"
    ):
        Plan.from_dict(PLAN.to_dict() | {"model": ["x" * 99]})
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(PlanError, match="must be str; it is a huge list"):
        Plan.from_dict(PLAN.to_dict() | {"model": nested})


def test_a_plan_keeps_nothing_that_no_backward_and_no_recompute_reads():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    (b,) = draft.run(a, makes=[1])
    (c,) = draft.run(b, makes=[1])
    draft.save(c)
    graph = draft.finish()
    a, b, c = (draft.values[value].storage for value in (a, b, c))
    for kept, named in [({a, b}, [2]), ({a, c}, [3]), ({a}, [1])]:
        found = region_plan(graph, "h", Choice(0, 3, frozenset(kept)))
        assert [k.number for k in found.kept] == named


def test_a_plan_keeps_what_the_user_holds_where_it_would_be_recomputed_or_read():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    (b,) = draft.run(a, makes=[1])
    draft.save(b)
    (c,) = draft.run(b, makes=[1])
    draft.save(c)
    for held in (a, c):
        draft.hold(held)
    graph = draft.finish()
    assert [k.number for k in region_plan(graph, "h", Choice(0, 3)).kept] == [1, 3]
    draft.hold(b)
    graph = draft.finish()
    assert [k.number for k in region_plan(graph, "h", Choice(0, 3)).kept] == [2, 3]


def test_a_plan_does_not_name_a_later_write_to_what_the_engine_keeps_unasked():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1], must_keep=True)
    draft.save(*draft.run(writes=[a]))
    graph = draft.finish()
    found = region_plan(graph, "h", Choice(0, 2, frozenset({1})))
    assert found.kept == ()


def test_names_shapes_dtypes_and_order_of_parameters_are_told_apart():
    first = [("a", (2, 3), "float32"), ("b c", (1,), "float32")]
    others = [
        [("d", (2, 3), "float32"), ("b c", (1,), "float32")],
        [("a", (3, 2), "float32"), ("b c", (1,), "float32")],
        [("a", (2, 3), "float16"), ("b c", (1,), "float32")],
        first[::-1],
        first[:1],
        [],
    ]
    texts = [parameter_text(*parameter) for parameter in first]
    assert parameter_differences(texts, texts) == []
    for other in others:
        assert parameter_differences(texts, [parameter_text(*p) for p in other])


def test_a_stage_is_named_by_the_operator_before_it_and_what_that_saves():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(a)
    (b,) = draft.run(a, makes=[2])
    draft.save(a, b)
    draft.run(b, makes=[1])
    draft.save(b)
    graph = draft.finish()
    stages = (Stage(0), Stage(2, frozenset({1})))
    found = region_plan(graph, "m", Choice(0, 3, frozenset(), stages))
    held = (KeptOutput(1, 0, "test.forward"),)
    assert found.stages == (StagePlan(0, 0, ()), StagePlan(2, 1, held))
