"""Births, releases and deaths of storages, against lists written by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from membudget.graph import Saved, StepGraph, Storage
from membudget.profile import profile
from membudget.profile.live_ranges import saved_activations

FAKE = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])


class Of(nn.Module):
    """A function of a weight and of the batch."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], size: int = 100):
        super().__init__()
        self.w = nn.Parameter(torch.randn(size))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.w, x)


def graph_of(model: nn.Module, x: Tensor, fake: bool) -> StepGraph:
    return profile(model, x, lambda o, _: o.sum(), fake=fake, device="h100").graph


def made_by(graph: StepGraph, name: str, nth: int = 0) -> Storage:
    """Return the storage that the nth operator of a name wrote."""
    return graph.storages[storage_of(graph, at(graph, name, nth))]


def at(graph: StepGraph, name: str, nth: int = 0) -> int:
    return [i for i, o in enumerate(graph.operators) if o.name == name][nth]


def storage_of(graph: StepGraph, moment: int) -> int:
    return graph.values[graph.operators[moment].outputs[0]].storage


def saved_by(graph: StepGraph, storage: Storage) -> list[Saved]:
    return [
        s
        for s in graph.saved
        if graph.storages[graph.values[s.value].storage] is storage
    ]


@FAKE
def test_the_live_ranges_of_a_chain_match_those_by_hand(fake):
    model = Of(lambda w, x: (w * x).sin().exp())

    graph = graph_of(model, torch.randn(100), fake)

    names = [o.name.split(".")[1] for o in graph.operators[: graph.backward_start]]
    assert names == ["mul", "sin", "exp", "sum"]
    product, sine, exponential = (
        made_by(graph, f"aten.{n}")
        for n in ("mul.Tensor", "sin.default", "exp.default")
    )
    total = made_by(graph, "aten.sum.default")
    assert [s.birth for s in (product, sine, exponential, total)] == [0, 1, 2, 3]
    assert [s.bytes for s in (product, sine, exponential, total)] == [400, 400, 400, 4]
    # The sine is let go of when the call of exp has returned, and exp saves its output.
    assert sine.death == 3
    assert sine.released is None
    # sin saves its operand, which nobody else holds once exp's call has begun.
    assert product.released == 2
    assert exponential.released == 4
    first, second, third = graph.saved
    # Each is asked for once, in the backward pass, the last first.
    assert [len(s.asked) for s in graph.saved] == [1, 1, 1]
    assert first.asked > second.asked > third.asked >= (graph.backward_start,)
    assert saved_by(graph, product) == [second]
    assert saved_by(graph, exponential) == [third]
    assert graph.storages[graph.values[first.value].storage].kind == "input"
    multiplied = at(graph, "aten.mul.Tensor", 1)  # The gradient of exp.
    assert graph.operators[multiplied].phase == "backward"
    assert third.asked
    assert third.asked[0] <= multiplied
    assert third.freed == exponential.death == multiplied + 1
    cosine = at(graph, "aten.cos.default")
    assert product.death == second.freed
    assert cosine < second.freed


@FAKE
def test_a_saved_tensor_has_the_op_index_of_the_operator_that_saves(fake):
    model = Of(lambda w, x: (w * x).sin().exp())

    graph = graph_of(model, torch.randn(100), fake)

    # mul and sin save operands before they run, exp its output after it has run.
    assert [s.moment for s in graph.saved] == [0, 1, 2]


@FAKE
def test_operands_and_outputs_that_one_operator_saves_have_one_moment(fake):
    def function(w: Tensor, x: Tensor) -> Tensor:
        # Views, which save nothing, run between what makes values and what saves them.
        h = (w * x).view(10, 10).t()
        return F.layer_norm(h, (10,), w[:10])

    graph = graph_of(Of(function), torch.randn(100), fake)

    norm = at(graph, "aten.native_layer_norm.default")
    by_norm = [graph.values[s.value].operator for s in graph.saved if s.moment == norm]
    view = at(graph, "aten.t.default")
    slices = at(graph, "aten.slice.Tensor")
    assert sorted(by_norm) == sorted([view, slices, norm, norm])


@FAKE
def test_an_output_that_two_operators_save_has_two_records(fake):
    model = Of(lambda w, x: (w * x).exp().sin())

    graph = graph_of(model, torch.randn(100), fake)

    exponential = made_by(graph, "aten.exp.default")
    moments = [s.moment for s in saved_by(graph, exponential)]
    assert moments == [at(graph, f"aten.{n}.default") for n in ("exp", "sin")]


@FAKE
def test_a_saved_tensor_is_the_value_that_its_operator_made(fake):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    graph = graph_of(model, torch.randn(5, 8), fake)

    places = [(s.module_path, graph.values[s.value].shape) for s in graph.saved]
    # A linear layer of a batch without a gradient saves the batch alone.
    assert places == [("0", (5, 8)), ("1", (5, 16)), ("2", (5, 16)), ("2", (16, 4))]
    moments = [s.moment for s in graph.saved]
    assert moments == sorted(moments)
    assert [graph.values[s.value].operator for s in graph.saved[1:3]] == [
        at(graph, "aten.addmm.default", 0),
        at(graph, "aten.gelu.default"),
    ]
    hidden, activated = (
        made_by(graph, n) for n in ("aten.addmm.default", "aten.gelu.default")
    )
    assert hidden.released is not None
    assert hidden.death == at(graph, "aten.gelu_backward.default") + 1
    assert activated.death <= hidden.death


@FAKE
def test_backward_operators_carry_the_path_of_their_forward(fake):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    graph = graph_of(model, torch.randn(5, 8), fake)

    backward = graph.operators[graph.backward_start :]
    products = [o.module_path for o in backward if o.name == "aten.mm.default"]
    assert products == ["2", "2", "0"]
    gelu = [o.module_path for o in backward if o.name == "aten.gelu_backward.default"]
    assert gelu == ["1"]


@FAKE
def test_what_is_there_before_the_step_comes_from_no_operator(fake):
    graph = graph_of(Of(lambda w, x: w * x), torch.randn(100), fake)

    before = [v for v in graph.values if v.operator < 0]
    assert {(v.operator, v.output) for v in before} == {(-1, 0)}
    storages = [graph.storages[v.storage] for v in before]
    assert {(s.birth, s.kind) for s in storages} == {(-1, "parameter"), (-1, "input")}
    made = [graph.storages[v.storage] for v in graph.values if v.operator >= 0]
    assert {s.kind for s in made} == {"activation", "gradient"}


@FAKE
def test_operators_that_draw_are_random_and_others_are_not(fake):
    graph = graph_of(Of(lambda w, x: F.dropout(w * x)), torch.randn(100), fake)

    drawn = [o.name for o in graph.operators if o.is_random]
    assert len(drawn) == 1
    assert all(type(o.is_random) is bool for o in graph.operators)


@FAKE
def test_views_share_the_storage_of_their_base(fake):
    model = Of(lambda w, x: (w * x).view(10, 10).t()[2:].unsqueeze(0).cos())

    graph = graph_of(model, torch.randn(100), fake)

    base = storage_of(graph, 0)
    assert [storage_of(graph, i) for i in range(1, 5)] == [base] * 4
    for operator in graph.operators[1:5]:
        assert operator.is_view
        assert operator.read_bytes == operator.written_bytes == operator.flops == 0
    assert len({o.outputs for o in graph.operators[:5]}) == 5
    assert graph.storages[base].bytes == 400


@FAKE
def test_an_in_place_write_makes_a_new_value_in_the_same_storage(fake):
    model = Of(lambda w, x: (w * x).relu_())

    graph = graph_of(model, torch.randn(100), fake)

    product, relu = graph.operators[:2]
    assert relu.name == "aten.relu_.default"
    assert relu.inputs == product.outputs
    assert relu.outputs != product.outputs
    assert storage_of(graph, 0) == storage_of(graph, 1)
    assert not relu.is_view
    assert (relu.read_bytes, relu.written_bytes) == (400, 400)


@FAKE
def test_written_arguments_come_after_the_outputs(fake):
    def function(w: Tensor, x: Tensor) -> Tensor:
        h = w * x
        h.relu_()
        with torch.no_grad():
            torch._foreach_add_(counters, 1.0)
        return h.view(10, 10)

    counters = [torch.zeros(2), torch.zeros(3)]
    graph = graph_of(Of(function), torch.randn(100), fake)

    def outputs(name: str) -> list[tuple[int, tuple[int, ...]]]:
        values = [graph.values[v] for v in graph.operators[at(graph, name)].outputs]
        return [(value.output, value.shape) for value in values]

    assert outputs("aten.mul.Tensor") == [(0, (100,))]
    # It returns its operand, which is no new tensor, and whose content is.
    assert outputs("aten.relu_.default") == [(1, (100,))]
    # It returns None, which is an output, too.
    assert outputs("aten._foreach_add_.Scalar") == [(1, (2,)), (2, (3,))]
    assert outputs("aten.view.default") == [(0, (10, 10))]


@FAKE
def test_the_statistics_that_a_norm_writes_come_after_its_outputs(fake):
    graph = graph_of(nn.BatchNorm1d(4), torch.randn(3, 4), fake)

    norm = graph.operators[at(graph, "aten.native_batch_norm.default")]
    written = [v for v in map(graph.values.__getitem__, norm.outputs) if v.output >= 3]
    assert [(graph.storages[v.storage].name, v.output) for v in written] == [
        ("running_mean", 3),
        ("running_var", 4),
    ]


@FAKE
def test_routing_is_pinned_and_arithmetic_is_not(fake):
    def function(w: Tensor, x: Tensor) -> Tensor:
        best, where = F.dropout(w * x).topk(5)
        return best * where.sort()[0] + (w * x).argmax()

    graph = graph_of(Of(function), torch.randn(100), fake)

    pinned = [o.name.split(".")[1] for o in graph.operators if o.must_keep]
    assert pinned == ["topk", "sort", "argmax"]
    assert all(type(o.must_keep) is bool for o in graph.operators)


class Shared(nn.Module):
    """Call a block twice, a module in which nothing runs once, and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.nothing = nn.Identity()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.nothing(self.block(x))
        return self.block(x).exp()


@FAKE
def test_each_call_of_a_shared_module_is_noted(fake):
    graph = graph_of(Shared(), torch.randn(3, 4), fake)

    names = [o.name.split(".")[1] for o in graph.operators[: graph.backward_start]]
    assert names == ["t", "addmm", "tanh", "t", "addmm", "tanh", "exp", "sum"]
    assert [(call.path, call.start, call.end) for call in graph.calls] == [
        ("", 0, 7),  # The loss is outside.
        ("block", 0, 3),
        ("block.0", 0, 2),
        ("block.1", 2, 3),
        ("nothing", 3, 3),
        ("block", 3, 6),
        ("block.0", 3, 5),
        ("block.1", 5, 6),
    ]
    made = [
        graph.values[value].operator for call in graph.calls for value in call.inputs
    ]
    assert made == [-1, -1, -1, 1, 2, 2, 2, 4]


@FAKE
def test_calls_that_the_backward_repeats_are_not_noted(fake):
    class Repeats(Shared):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.block, x, use_reentrant=False)
            return y

    graph = graph_of(Repeats(), torch.randn(3, 4), fake)

    assert [c.path for c in graph.calls] == ["", "block", "block.0", "block.1"]
    assert [(c.start, c.end) for c in graph.calls[:2]] == [(0, 3), (0, 3)]


@FAKE
def test_a_module_call_that_raises_ends_with_the_call_around_it(fake):
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError

    class Survives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.last = Fails(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with suppress(KeyError):
                self.fails(x)
            y: Tensor = self.last(x)
            return y

    graph = graph_of(Survives(), torch.randn(3, 4), fake)

    calls = {c.path: (c.start, c.end) for c in graph.calls}
    assert calls == {"": (0, 4), "fails": (0, 4), "last": (2, 4)}


@FAKE
def test_gradients_live_from_their_operator_to_the_end(fake):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    graph = graph_of(model, torch.randn(5, 8), fake)

    gradients = {s.name: s for s in graph.storages if s.kind == "gradient"}
    assert gradients.keys() == {n for n, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert gradients[name].bytes == parameter.nbytes
        assert gradients[name].death == len(graph.operators)
        assert gradients[name].birth > graph.backward_start
    assert gradients["2.weight"].birth < gradients["0.weight"].birth


@FAKE
@pytest.mark.parametrize("uses", [2, 3, 4, 5])
def test_accumulated_gradients_share_one_storage(fake, uses):
    def function(w: Tensor, x: Tensor) -> Tensor:
        h = w * x
        return torch.stack([h * (i + 2) for i in range(uses)]).exp()

    graph = graph_of(Of(function), torch.randn(100), fake)

    sums = [
        i
        for i, o in enumerate(graph.operators)
        if o.phase == "backward" and o.name == "aten.add.Tensor"
    ]
    assert len(sums) == uses - 1
    assert len({storage_of(graph, i) for i in sums}) == 1


@FAKE
def test_the_gradient_of_a_tied_weight_is_one(fake):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.w).tanh(), self.w)

    graph = graph_of(Tied(), torch.randn(3, 6), fake)

    gradients = [s for s in graph.storages if s.kind == "gradient"]
    assert [s.name for s in gradients] == ["w"]


@FAKE
def test_static_bytes_count_each_storage_once(fake):
    embed = nn.Embedding(9, 6)
    head = nn.Linear(6, 9, bias=False)
    head.weight = embed.weight
    model: Any = nn.Sequential(embed, head, nn.BatchNorm1d(9, affine=False))
    tokens = torch.randint(9, (5,))

    static = graph_of(model, tokens, fake).static

    assert static.parameters == 9 * 6 * 4
    assert static.buffers == 2 * 9 * 4 + 8
    assert static.inputs == 5 * 8
    assert static.optimizer == 0
    assert static.total == 216 + 80 + 40


@FAKE
def test_the_tensors_of_a_dataclass_are_inputs(fake):
    from tests.zoo.arguments import Pair

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, pair: Pair) -> Tensor:
            return pair.left * self.w * pair.right

    pair = Pair(torch.randn(4), torch.randn(4))
    found = profile(Product(), pair, fake=fake, device="h100")

    assert found.graph.static.inputs == 32


def test_memory_that_is_emptied_before_and_filled_in_a_step_counts_while_filled() -> (
    None
):
    gathered = torch.zeros(1000)
    gathered.untyped_storage().resize_(0)

    def between(w: Tensor, x: Tensor) -> Tensor:
        x = x * w
        gathered.untyped_storage().resize_(4000)
        gathered.fill_(1)
        x = x + gathered[:100]
        gathered.untyped_storage().resize_(0)
        return x.sin().exp()

    graph = graph_of(Of(between), torch.ones(100), fake=False)

    storage = next(s for s in graph.storages if s.kind == "outside" and s.bytes == 4000)
    assert storage.birth == at(graph, "aten.fill_.Scalar")
    assert storage.death == at(graph, "aten.sin.default")


def test_saved_memory_that_is_emptied_is_no_saved_activation() -> None:
    gathered = torch.zeros(1000)
    gathered.untyped_storage().resize_(0)

    def resize(size: int) -> None:
        gathered.untyped_storage().resize_(size)

    def between(w: Tensor, x: Tensor) -> Tensor:
        resize(4000)
        with torch.no_grad():
            gathered.fill_(1)
        copy = w * 1
        y = copy * gathered  # Saved for the gradient of `copy`.
        y.register_hook(lambda _: resize(4000))
        copy.register_hook(lambda _: resize(0))
        resize(0)
        return y

    graph = graph_of(Of(between, 1000), torch.ones(1), fake=False)

    filled = [s for s in graph.storages if s.kind == "outside" and s.birth >= 0]
    assert [s.bytes for s in filled] == [4000, 4000]
    assert filled[0].death < graph.backward_start <= filled[1].birth
    assert all(
        graph.storages[a.storage].kind != "outside" for a in saved_activations(graph)
    )
