"""Spans: regions from the entry of one module to the exit of a later one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.attach import carried_by, has_region, put_region
from membudget.engine.controls import set_checkpoint_early_stop
from membudget.engine.options import RegionOptions
from tests.oracles import CountedOperators


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 32)
        self.narrow = nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return x + self.dropout(y)


class Model(nn.Module):
    """Blocks in a loop, with something between them that a test may set."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(8, 3)
        self.between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.h):
            x = block(x)
            if self.between is not None:
                self.between(number)
        return self.head(x)


SPANS = [("h.0", "h.2"), ("h.3", "h.5")]


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def outcome(model: Model) -> list[Tensor]:
    """Run one step and return all that it made."""
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(4, 8, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward()
    gradients = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return [loss.detach(), torch.rand(2), *(g.clone() for g in gradients)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("keep", [None, mb.policies.matmuls])
@pytest.mark.parametrize(
    "spans", [SPANS, [("h.0", "h.5")], [("h.1", "h.1")], [("h.0", "head")]]
)
def test_a_step_under_spans_is_the_plain_step(spans: Any, keep: Any) -> None:
    expected = outcome(made())
    model = made()
    applied = mb.apply(model, spans=spans, keep=keep)

    assert same(outcome(model), expected)
    assert [r.forwards for r in applied.status().regions] == [1] * len(spans)


def test_a_span_drops_what_its_blocks_save() -> None:
    model = made()
    x = torch.randn(4, 8)
    plain_bytes = mb.saved(model, x).activation_bytes

    mb.apply(model, spans=SPANS)

    assert mb.saved(model, x).activation_bytes < 0.2 * plain_bytes


def test_spans_are_taken_off_again() -> None:
    model = made()
    types = [type(module) for module in model.modules()]
    applied = mb.apply(model, spans=SPANS)
    applied.remove()

    assert [type(module) for module in model.modules()] == types
    assert same(outcome(model), outcome(made()))


def test_an_exception_between_two_blocks_closes_the_span() -> None:
    model = made()
    mb.apply(model, spans=SPANS)

    def stuck(number: int) -> None:
        if number == 1:
            raise KeyError("stuck")

    model.between = stuck
    with pytest.raises(KeyError, match="stuck"):
        outcome(model)
    model.between = None

    assert same(outcome(model), outcome(made()))


def test_a_context_that_is_left_open_inside_a_span_is_refused() -> None:
    model = made()
    mb.apply(model, spans=[("h.0", "h.2")])
    context = torch.autocast("cpu", dtype=torch.bfloat16)

    def crossing(number: int) -> None:
        if number == 1:
            context.__enter__()

    model.between = crossing
    try:
        with pytest.raises(mb.CheckpointError, match="ends in a different context"):
            model(torch.randn(4, 8))
    finally:
        context.__exit__(None, None, None)
    model.between = None

    assert same(outcome(model), outcome(made()))


def test_a_span_whose_end_is_never_called_is_an_error() -> None:
    model = made()
    mb.apply(model, spans=[("h.4", "h.1")])

    with pytest.raises(mb.CheckpointError, match="before their parent returned"):
        model(torch.randn(4, 8))


def test_nothing_is_recorded_without_gradients() -> None:
    model = made()
    applied = mb.apply(model, spans=SPANS)
    with torch.no_grad():
        model(torch.randn(4, 8))

    assert [r.forwards for r in applied.status().regions] == [0, 0]


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([], "empty"),
        ([("h.0", "h.9")], "no module 'h.9'"),
        ([("h.0", "h.2"), ("h.0", "h.1")], "overlaps"),
    ],
)
def test_spans_that_cannot_be_are_refused(spans: Any, says: str) -> None:
    model = made()
    with pytest.raises(mb.SelectionError, match=says):
        mb.apply(model, spans=spans)

    assert same(outcome(model), outcome(made()))


def test_spans_do_not_go_with_the_rerun_engine() -> None:
    with pytest.raises(mb.SelectionError, match="replay engine"):
        mb.apply(made(), spans=SPANS, engine="rerun")


def test_a_span_is_left_out_while_regions_are_off() -> None:
    model = made()
    applied = mb.apply(model, spans=SPANS)
    with mb.disable_checkpointing():
        found = outcome(model)

    assert same(found, outcome(made()))
    assert [r.forwards for r in applied.status().regions] == [0, 0]


def test_a_span_that_saves_nothing_is_skipped() -> None:
    model = made()
    applied = mb.apply(model, spans=SPANS)
    model.requires_grad_(False)
    model(torch.randn(4, 8))

    regions = applied.status().regions
    assert [(r.forwards, r.skipped) for r in regions] == [(0, 1), (0, 1)]
    assert [r.name for r in regions] == ["h.0–h.2", "h.3–h.5"]
    assert applied.names == tuple(r.name for r in regions)


def test_spans_are_among_the_regions_that_are_collected() -> None:
    model = made()
    mb.apply(model, spans=SPANS)
    with mb.collect_regions() as regions:
        loss = model(torch.randn(4, 8)).sum()
    assert len(regions) == 2
    with CountedOperators() as recomputed:
        regions.recompute()
    with CountedOperators() as backward:
        loss.backward()
    assert (recomputed.counts["gelu"], backward.counts["gelu"]) == (6, 0)


def test_spans_run_under_switches_that_collect_nothing() -> None:
    model = made()
    applied = mb.apply(model, spans=SPANS)
    with set_checkpoint_early_stop(False):
        assert same(outcome(model), outcome(made()))
    assert [r.forwards for r in applied.status().regions] == [1, 1]


@pytest.mark.parametrize(
    ("spans", "regions"),
    [
        (SPANS, ["h.2", "h.5"]),
        ([("h.1", "h.1")], ["h.1"]),
    ],
)
def test_an_audit_counts_each_span_once(spans: Any, regions: list[str]) -> None:
    model = made()
    mb.apply(model, spans=spans)
    report = mb.audit(model, torch.randn(4, 8))
    assert report.equal
    assert [r.name for r in report.regions or ()] == regions
    assert report.regions_ran == report.recomputes == len(spans)


class Twice(Model):
    """Calls its first block twice before its last one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.h[5](self.h[0](self.h[0](x)))


def test_a_span_that_begins_twice_is_an_error() -> None:
    model = Twice()
    mb.apply(model, spans=[("h.0", "h.5")])
    with pytest.raises(mb.CheckpointError, match=r"'h\.0–h\.5' was entered twice bef"):
        model(torch.randn(4, 8))


class Held(nn.Module):
    """Blocks in a dict in a list, neither of which is ever called."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleDict({"a": Block(), "b": Block()})
        self.lists = nn.ModuleList([blocks])

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.lists[0]
        return blocks["b"](blocks["a"](x))


def test_the_parent_of_a_span_is_the_module_that_calls_its_blocks() -> None:
    model = Held()
    applied = mb.apply(model, spans=[("lists.0.a", "lists.0.b")])
    types = [name for name, m in model.named_modules() if has_region(m)]
    assert types == ["", "lists.0.a", "lists.0.b"]
    model(torch.randn(4, 8)).sum().backward()
    assert [r.forwards for r in applied.status().regions] == [1]
    applied.remove()
    assert not any(map(has_region, model.modules()))


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([("h.1", "h.3"), ("h.2", "h.3")], "span h.2–h.3 overlaps another one"),
        # The last module of one would begin the next before the first has ended.
        ([("h.0", "h.2"), ("h.2", "h.4")], "span h.2–h.4 overlaps another one"),
        ([("h.2", "h.4"), ("h.0", "h.2")], "span h.0–h.2 overlaps another one"),
        ([("h.1", "h.1"), ("h.1", "h.2")], "span h.1–h.2 overlaps another one"),
        ([("h.1", "h.2"), ("h.1.wide", "h.1.norm")], "'h.1' holds a span and is in"),
        ([("h.1.wide", "h.1.norm"), ("h.1", "h.2")], "'h.1' is in a span and holds"),
        ([("h.0", "")], "Model has no module ''; it has 'h', 'h.0', 'h.0.norm'"),
    ],
)
def test_spans_that_get_in_each_other_s_way_are_refused(spans: Any, says: str) -> None:
    model = made()
    with pytest.raises(mb.SelectionError, match=says):
        mb.apply(model, spans=spans)
    assert not any(map(has_region, model.modules()))


def test_a_refused_span_names_the_first_eight_modules() -> None:
    with pytest.raises(mb.SelectionError, match="no module 'x'") as raised:
        mb.apply(made(), spans=[("x", "h.1")])
    assert str(raised.value).endswith("'h.0.dropout', 'h.1', 'h.1.norm'")


def test_a_module_that_has_a_region_begins_no_span() -> None:
    model = made()
    mb.apply(model, names="h.1")
    with pytest.raises(mb.SelectionError, match=r"'h\.1' already has a region; remove"):
        mb.apply(model, spans=[("h.0", "h.1")])


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        lambda: torch.device("cpu"),
    ],
    ids=["no-grad", "inference", "hooks", "function-mode"],
)
def test_a_span_ends_in_the_surroundings_that_it_began_in(context: Any) -> None:
    model, entered = made(), context()
    mb.apply(model, spans=[("h.0", "h.2")])
    model.between = lambda number: entered.__enter__() if number == 1 else None
    try:
        with pytest.raises(mb.CheckpointError, match="ends in a different context"):
            model(torch.randn(4, 8))
    finally:
        entered.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("parent", "span", "says"),
    [("0", ("0.0", "0.1"), "module '0'"), ("", ("0", "1"), "the model")],
)
def test_a_module_that_has_a_region_holds_no_span(
    parent: str, span: tuple[str, str], says: str
) -> None:
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential(pair, nn.Linear(2, 2))
    module = model.get_submodule(parent)
    put_region(module, RegionOptions())
    before = carried_by(module)

    with pytest.raises(mb.SelectionError, match=f"{says} already has a region; remove"):
        mb.apply(model, spans=[span])
    assert carried_by(module) is before
    assert [m for m in model.modules() if has_region(m)] == [module]
