"""The tree of modules, the contents of the peak, and the advice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from torch import nn

import membudget as mb
from membudget.graph import StepGraph
from membudget.planner.timeline import timeline
from membudget.profile.live_ranges import saved_ranges
from membudget.report.advice import advise, floor
from membudget.report.module_tree import (
    Figures,
    ModuleNode,
    Summary,
    fold,
    repeated_blocks,
    summarise,
)
from tests.profile.random_steps import steps
from tests.profile.small_models import convolutions, language_model, perceptron
from tests.strategies import generated

INTEGERS = ("parameter_bytes", "saved_bytes", "peak_bytes", "flops")
MAKERS = [language_model, perceptron, convolutions]


def nodes(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    for child in node.children:
        yield from nodes(child)


def assert_sums(root: ModuleNode) -> None:
    for node in nodes(root):
        if node.children:
            parts = (child.figures for child in node.children)
            assert node.figures == sum(parts, Figures())


def integers(figures: Figures) -> dict[str, int]:
    return {name: getattr(figures, name) for name in INTEGERS}


def assert_adds_up(graph: StepGraph) -> None:
    summary = summarise(graph)
    peak_bytes = timeline(graph).peak_bytes

    assert_sums(summary.modules)
    assert_sums(fold(summary.modules))
    assert integers(fold(summary.modules).figures) == integers(summary.modules.figures)
    assert integers(summary.modules.figures) == {
        "parameter_bytes": sum(
            s.bytes for s in graph.storages if s.kind == "parameter"
        ),
        "saved_bytes": summary.saved_bytes,
        "peak_bytes": peak_bytes,
        "flops": graph.flops,
    }
    # Sums of floats in another order.
    assert summary.modules.figures.seconds == pytest.approx(graph.seconds, rel=1e-9)
    assert_peak_adds_up(graph, summary, peak_bytes)


def assert_peak_adds_up(graph: StepGraph, summary: Summary, peak_bytes: int) -> None:
    peak = summary.peak
    advice = advise(graph, peak)

    assert peak.peak_bytes == peak_bytes
    assert sum(peak.by_group().values()) == peak_bytes
    assert sum(peak.by_module().values()) + peak.optimizer_bytes == peak_bytes
    assert advice.droppable_bytes + advice.fixed_bytes == peak_bytes
    assert advice.logits_bytes + advice.gradient_bytes <= advice.fixed_bytes
    assert advice.floor_bytes <= peak_bytes
    if graph.operators:
        # Two ways to the same figure: by the items, and by intervals.
        rest = floor(graph).alive_bytes[peak.moment]
        workspace = graph.operators[peak.moment].workspace_bytes
        assert rest + workspace == advice.fixed_bytes


@generated(max_examples=300)
@given(steps())
def test_every_total_of_a_random_step_is_the_sum_of_its_parts(graph):
    assert_adds_up(graph)


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("make", MAKERS)
def test_every_total_of_a_real_step_is_the_sum_of_its_parts(make, fake):
    found = mb.profile(*make(), fake=fake, optimizer=torch.optim.AdamW)

    assert_adds_up(found.graph)
    assert summarise(found.graph).modules.figures.parameter_bytes == (
        found.graph.static.parameters
    )


@pytest.mark.parametrize("make", MAKERS)
def test_the_saved_tensors_are_those_that_autograd_holds(make):
    model, batch, loss_fn = make()

    def forward(model, batch):
        output = model(batch)
        return output.sum() if loss_fn is None else loss_fn(output, batch)

    report = mb.saved(forward, model, batch)
    summary = summarise(mb.profile(model, batch, loss_fn).graph)

    assert summary.saved_bytes == report.activation_bytes
    assert sorted(s.bytes for s in summary.saved) == sorted(
        {r.storage: r.bytes for r in report.records if r.kind == "activation"}.values()
    )


def test_a_saved_tensor_is_listed_with_its_origin():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    (kept,) = summarise(mb.profile(model, torch.ones(3, 4)).graph).saved

    assert (kept.module_path, kept.operator) == ("1", "aten.tanh.default")
    assert (kept.shape, kept.dtype, kept.bytes) == ((3, 8), "float32", 96)


def test_a_storage_that_is_saved_twice_counts_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x):
            y = x.sin()
            return self.first(y) + self.second(y[:, :4])

    x = torch.ones(3, 4, requires_grad=True)
    summary = summarise(mb.profile(Twice(), x).graph)

    assert [(s.module_path, s.bytes) for s in summary.saved] == [("first", 48)]


def test_a_tensor_that_autograd_releases_in_the_forward_is_not_listed():
    class Unused(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.exp()
            return y.tanh()

    summary = summarise(mb.profile(Unused(4, 8), torch.ones(3, 4)).graph)

    assert [s.operator for s in summary.saved] == ["aten.tanh.default"]


def test_a_tensor_that_something_else_holds_cannot_be_dropped():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
            self.cache = None

        def forward(self, x):
            self.cache = x.sin()
            return self.blocks(self.cache)

    graph = mb.profile(Cached(), torch.ones(512, 64, requires_grad=True)).graph
    held = saved_ranges(graph)
    names = {i: graph.operators[graph.storages[i].birth].name for i in held}
    can_be_dropped = {names[i]: h.drop_start < h.last for i, h in held.items()}

    assert can_be_dropped == {"aten.sin.default": False, "aten.tanh.default": True}


def test_a_tensor_that_a_region_drops_is_not_listed():
    model, batch, loss_fn = language_model()
    plain = summarise(mb.profile(model, batch, loss_fn).graph)
    mb.apply(model, names="h.*")
    regions = summarise(mb.profile(model, batch, loss_fn).graph)

    assert regions.saved_bytes < plain.saved_bytes / 2


def test_a_shared_parameter_counts_once():
    model, batch, loss_fn = language_model()
    model.get_submodule("head").weight = model.get_parameter("embed.weight")
    children = {
        node.label: node.figures.parameter_bytes
        for node in summarise(mb.profile(model, batch, loss_fn).graph).modules.children
    }

    assert children["embed"] == 500 * 16 * 4
    assert children["head"] == 0


def test_equal_blocks_are_folded_with_their_children():
    model, batch, loss_fn = language_model(blocks=3)
    graph = mb.profile(model, batch, loss_fn, fake=True).graph
    summary = summarise(graph)
    children = {node.label: node for node in fold(summary.modules).children}
    (row,) = children["h"].children

    assert repeated_blocks(graph) == ("h.0", "h.1", "h.2")
    assert row.label == "h.0 … h.2 (3×)"
    assert row.paths == ("h.0", "h.1", "h.2")
    assert row.figures.parameter_bytes == 3 * sum(
        parameter.nbytes for parameter in model.get_submodule("h.0").parameters()
    )
    inside = {child.label: child.paths for child in row.children}
    assert inside["up"] == ("h.0.up", "h.1.up", "h.2.up")


def test_blocks_that_differ_are_not_folded():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 4))
    graph = mb.profile(model, torch.ones(2, 4)).graph

    assert repeated_blocks(graph) == ()
    assert [n.label for n in fold(summarise(graph).modules).children] == [
        *("0", "1", "2", "(itself, loss)")
    ]


def test_the_optimizer_has_a_row_of_its_own():
    found = mb.profile(*perceptron(), fake=True, optimizer=torch.optim.AdamW)
    rows = {node.label: node for node in summarise(found.graph).modules.children}

    seconds = sum(o.seconds for o in found.graph.operators if o.phase == "optimizer")
    assert rows["(optimizer)"].figures.seconds == pytest.approx(seconds)
    assert rows["(optimizer)"].figures.forward_seconds == 0


def test_a_step_that_allocates_nothing_can_be_summarised():
    graph = StepGraph((), (), (), (), (), 0, 0, mb.profile(*perceptron()).graph.static)
    summary = summarise(graph)

    assert summary.modules.figures == Figures()
    assert advise(graph, summary.peak).texts[0] == "The step allocates nothing."


# What to do about it.


def test_advice_names_logits_at_the_peak():
    found = mb.profile(*language_model(vocabulary=5000), fake=True)
    advice = advise(found.graph, summarise(found.graph).peak)

    # log_softmax, its gradient, and the gradient of the logits.
    assert advice.logits_bytes == 3 * 2 * 16 * 5000 * 4
    assert any("Chunk the loss" in text for text in advice.texts)


def test_small_logits_are_not_mentioned():
    found = mb.profile(*language_model(vocabulary=8, batch=16), fake=True)
    advice = advise(found.graph, summarise(found.graph).peak)

    assert not any("logits" in text for text in advice.texts)
    assert any("Checkpointing can drop at most" in text for text in advice.texts)


def test_advice_names_gradients_at_the_peak():
    found = mb.profile(*perceptron(batch=1, width=256), fake=True)
    advice = advise(found.graph, summarise(found.graph).peak)

    assert advice.gradient_bytes > 0.25 * found.peak_bytes
    assert any("Gradients of parameters" in text for text in advice.texts)


def test_advice_names_static_bytes_that_exceed_the_peak():
    found = mb.profile(*perceptron(batch=1), fake=True, optimizer=torch.optim.AdamW)
    advice = advise(found.graph, summarise(found.graph).peak)

    assert found.graph.static.total > found.peak_bytes
    assert any("are in use before the step" in text for text in advice.texts)


def test_a_peak_in_the_optimizer_is_reported_there():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    found = mb.profile(model, torch.ones(1, 64), fake=True, optimizer=torch.optim.AdamW)
    peak = summarise(found.graph).peak

    assert peak.operator is not None
    assert peak.operator.phase == "optimizer"
    assert "is in the optimizer's step" in advise(found.graph, peak).texts[0]


@pytest.mark.parametrize("names", ["h.*", ["h.0", "h.2"], ["h.*", "head"], ["embed"]])
def test_no_choice_of_regions_gets_below_the_floor(names):
    model, batch, loss_fn = language_model(batch=4, length=32, vocabulary=64)
    graph = mb.profile(model, batch, loss_fn).graph
    least = advise(graph, summarise(graph).peak).floor_bytes
    mb.apply(model, names=names)

    def step():
        loss_fn(model(batch), batch).backward()

    step()
    model.zero_grad()
    assert mb.peak(step).peak_bytes >= least
