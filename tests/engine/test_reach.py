"""What a function can read besides its arguments, wherever it is kept."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from membudget.engine import reach as walk
from membudget.engine import slots
from membudget.engine.reach import Reached, reach
from tests import devices

# Globals that functions below name, among others that hold nothing.
NUMBER, TEXT, NOTHING = 3, "text", None
FIRST, SECOND, THIRD = torch.ones(1), torch.ones(2), torch.ones(3)
IN_A_LIST, IN_A_DICT = [torch.ones(4)], {"key": [torch.ones(5)]}
GENERATOR = devices.generator()


def helper(x: Tensor) -> Tensor:
    return x * SECOND


def names_many(x: Tensor) -> Any:
    """Names globals that hold something among globals that do not."""
    inert = (NUMBER, TEXT, NOTHING, torch.sin, np, functools, len, nn.Linear, Holder)
    library = (nn.functional.linear, functools.wraps, random.random)
    return FIRST, IN_A_LIST, IN_A_DICT, THIRD, helper, inert, library, GENERATOR


def names_nothing(x: Tensor, others: list[Tensor]) -> None: ...


@dataclass
class Record:
    inner: Any


class Holder(Record):
    """Names tensors in its methods."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.inner * FIRST

    @classmethod
    def build(cls) -> Any:
        return THIRD

    @staticmethod
    def apart() -> Any:
        return SECOND


class Derived(Holder):
    """Names nothing itself."""


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "CODE_SLOTS", {})
    slots.class_slots.cache_clear()


def tensors(function: Any, *others: Any) -> set[int]:
    return {id(t) for t in reach(function, others).tensors}


def ids(*found: Tensor) -> set[int]:
    return {id(t) for t in found}


def test_every_global_that_a_function_names_is_found_whatever_stands_beside_it():
    expected = ids(FIRST, SECOND, THIRD, IN_A_LIST[0], IN_A_DICT["key"][0])
    assert tensors(names_many) == expected
    assert reach(names_many).generators == [GENERATOR]


def test_a_global_that_is_bound_anew_is_found_in_the_next_walk(monkeypatch):
    other = torch.ones(9)
    tensors(names_many)
    monkeypatch.setitem(globals(), "FIRST", other)
    assert id(other) in tensors(names_many)


def test_a_global_that_holds_nothing_yet_is_found_once_it_does(monkeypatch):
    tensors(names_many)
    late = torch.ones(7)
    monkeypatch.setitem(globals(), "NOTHING", late)
    assert id(late) in tensors(names_many)


def test_what_functions_inside_name_is_found():
    def outer(x: Tensor) -> Any:
        return [lambda: FIRST, (y for y in SECOND)]

    assert tensors(outer) == ids(FIRST, SECOND)


def test_closures_defaults_and_what_a_method_is_bound_to_are_found():
    closed, default, keyword, held = (torch.ones(n) for n in range(1, 5))

    def function(x: Tensor, y: Tensor = default, *, z: Tensor = keyword) -> Any:
        return x * closed

    assert tensors(function) == ids(closed, default, keyword)
    holder = Holder(held)
    assert tensors(holder.__call__) == ids(held, FIRST, SECOND, THIRD)
    assert tensors(functools.partial(names_nothing, held, others=[FIRST])) == ids(
        held, FIRST
    )


def test_globals_named_by_any_method_of_a_class_or_its_bases_are_found():
    held = torch.ones(1)
    assert tensors(Derived(held)) == ids(held, FIRST, SECOND, THIRD)


def test_a_cell_that_is_still_empty_hides_no_other():
    closed = torch.ones(1)

    def function(x: Tensor) -> Any:
        return a_later(x) * closed * later(x)

    found = tensors(function)
    a_later = later = torch.sin
    assert found == ids(closed)
    assert a_later is later


def test_objects_are_followed_for_three_steps():
    deep = torch.ones(1)
    assert tensors(Record(Record(Record(deep)))) == ids(deep)
    assert tensors(Record(Record(Record(Record(deep))))) == set()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: [t],
        lambda t: (t,),
        lambda t: {t},
        lambda t: {"key": t},
        lambda t: [[{"key": (t,)}]],
        lambda t: type("List", (list,), {})([t]),
        lambda t: type("Dict", (dict,), {})(key=t),
    ],
)
def test_containers_are_followed_as_deep_as_they_go(wrap):
    tensor = torch.ones(1)
    assert tensors(functools.partial(torch.sin, wrap(tensor))) == ids(tensor)


def test_a_container_too_long_to_be_walked_is_passed_over(monkeypatch):
    monkeypatch.setattr(walk, "_MAX_ITEMS", 2)
    tensor = torch.ones(1)
    for short in ([1, tensor], {1: 1, 2: tensor}):
        assert tensors(Record(short)) == ids(tensor)
        assert any(held is short for held, _ in reach(Record(short)).containers)
    for long in ([1, 2, tensor], {1: 1, 2: 2, 3: tensor}):
        assert tensors(Record(long)) == set()
        assert all(held is not long for held, _ in reach(Record(long)).containers)


def test_containers_are_noted_with_the_ids_of_their_items_or_keys():
    cache = [1, 2]
    table = {"a": cache}
    found = reach(Record(table)).containers
    assert [(id(held), items) for held, items in found] == [
        (id(table), [id("a")]),
        (id(cache), [id(1), id(2)]),
    ]


def test_what_holds_itself_is_walked_once():
    tensor = torch.ones(1)
    endless: list[Any] = [tensor]
    endless.append(endless)
    assert [id(t) for t in reach(Record(endless)).tensors] == [id(tensor)]


def test_a_tensor_or_module_is_listed_once_for_each_name_bound_to_it():
    tensor, module = torch.ones(1), nn.Linear(1, 1, bias=False)
    found = reach(Record([tensor, module, tensor, module]))
    assert list(map(id, found.tensors)) == [id(tensor), id(module.weight), id(tensor)]
    assert found.modules == [module, module]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("absent", None)
        self.average = torch.zeros(2)
        self.late: Tensor | None = None
        self.hidden = [nn.Linear(1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * FIRST


def test_parameters_buffers_and_attributes_of_a_model_are_found():
    model = Model()
    found = reach(model)
    steps, average = model.get_buffer("steps"), model.average
    inner = model.hidden[0]
    assert {id(t) for t in found.tensors} == ids(
        *(*model.parameters(), *inner.parameters(), steps, average, FIRST)
    )
    assert {id(b) for b in found.buffers} == ids(steps, average)
    assert [id(m) for m in found.modules] == [id(model), id(model.layer), id(inner)]
    assert found.stateful_modules == [model]
    assert not found.writes_statistics


def test_a_module_that_is_kept_from_the_list_of_submodules_is_found():
    model, kept = nn.Linear(1, 1), nn.BatchNorm1d(2)
    model.__dict__["teacher"] = kept
    found = reach(model)
    assert [id(m) for m in found.modules] == [id(model), id(kept)]
    assert found.writes_statistics


def test_an_attribute_that_becomes_a_tensor_is_found():
    model = Model()
    reach(model)
    model.late = torch.zeros(3)
    model.new = torch.zeros(4)
    assert ids(model.late, model.new) <= ids(*reach(model).buffers)


def test_an_activation_on_a_model_is_read_but_is_no_state():
    model = Model()
    model.average = model.layer(torch.ones(2))
    found = reach(model)
    assert id(model.average) in ids(*found.tensors)
    assert id(model.average) not in ids(*found.buffers)


@pytest.mark.parametrize("training", [True, False])
def test_a_normalisation_writes_its_statistics_in_training_and_in_silence(training):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train(training)
    found = reach(model)
    assert found.writes_statistics is training
    assert found.silent == ids(*model[1].buffers())


def test_private_generators_of_every_kind_are_found():
    generators = [
        *(devices.generator(), random.Random(0), np.random.default_rng(0)),
        *(np.random.RandomState(0), type("Mine", (random.Random,), {})()),
    ]
    found = reach(Record(generators)).generators
    assert [id(g) for g in found] == [id(g) for g in generators]


def test_names_say_where_each_tensor_is_kept():
    model = Model()
    closed = {"scale": [torch.ones(1)]}

    def function(x: Tensor, shift: Tensor = THIRD) -> Tensor:
        return model(x) * closed["scale"][0] * SECOND

    found = reach(function, names=True)
    assert found.names is not None
    names = {
        name: found.names[id(t)]
        for name, t in {
            "weight": model.layer.weight,
            "buffer": model.steps,
            "closed": closed["scale"][0],
            "global": SECOND,
            "default": THIRD,
            "in a list": model.hidden[0].weight,
        }.items()
    }
    assert names == {
        "weight": "model.layer.weight",
        "buffer": "model.steps",
        "closed": "closed['scale'][0]",
        "global": "SECOND",
        "default": "function's default[0]",
        "in a list": "model.hidden[0].weight",
    }
    assert found.module_names[id(model.layer)] == "model.layer"
    assert found.names[id(closed)] == "closed"


def test_names_of_a_model_alone_are_those_of_named_parameters():
    model = Model()
    names = reach(model, names=True).names
    assert names is not None
    assert {k: names[id(p)] for k, p in model.named_parameters()} == {
        k: k for k, _ in model.named_parameters()
    }


def test_other_arguments_are_walked_too():
    assert tensors(torch.sin, Record(SECOND)) == ids(SECOND)


def test_what_holds_nothing_holds_no_state():
    assert not reach(torch.sin).holds_state()
    assert not Reached().holds_state()
    assert reach(Record([])).holds_state()
    assert reach(Record(torch.ones(1))).holds_state()
    assert reach(nn.Tanh()).holds_state()


def test_a_function_of_its_arguments_alone_reaches_nothing():
    times = 2

    def repeated(x: Any) -> Any:
        for _ in range(times):
            x = x.sin()
        return x

    assert reach(repeated) is walk.NOTHING
    assert reach(lambda x: x.sin()) is walk.NOTHING
    assert not walk.NOTHING.holds_state()
    # With names or with other arguments, the walk notes more than that.
    assert reach(repeated, names=True) is not walk.NOTHING
    assert tensors(repeated, Record(SECOND)) == ids(SECOND)


def test_a_number_that_a_function_closes_over_may_become_a_tensor():
    scale: Any = 2

    def scaled(x: Any) -> Any:
        return x * scale

    assert reach(scaled) is walk.NOTHING
    scale = torch.ones(3)
    assert tensors(scaled) == ids(scale)


def test_a_function_with_a_default_or_a_global_reaches_it():
    default = torch.ones(2)
    assert tensors(lambda x, scale=default: x * scale) == ids(default)
    assert tensors(lambda x: x * FIRST) == ids(FIRST)


def test_a_number_that_becomes_a_tensor_is_found():
    model, scale = nn.Tanh(), torch.ones(3)
    model.scale = 1.0  # type: ignore[assignment]
    assert tensors(model) == ids()
    model.scale = scale
    assert tensors(model) == ids(scale)


def test_an_attribute_in_place_of_another_is_found():
    model, scale = nn.Tanh(), torch.ones(3)
    model.number = 1.0  # type: ignore[assignment]
    assert tensors(model) == ids()
    del model.number
    model.scale = scale
    assert tensors(model) == ids(scale)


def test_the_attributes_of_a_module_are_forgotten_with_it():
    model = nn.Tanh()
    reach(model)
    number = id(model)
    assert number in slots.ATTRIBUTES
    del model
    assert number not in slots.ATTRIBUTES


def test_objects_of_a_library_are_not_walked():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))])

    assert reach(lambda: optimizer).tensors == []
    assert reach(lambda: optimizer).containers == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_buffers_beside_what_torchscript_runs_are_found():
    plain = nn.BatchNorm1d(2).eval()
    traced = torch.jit.trace(nn.BatchNorm1d(2).eval(), torch.ones(1, 2))

    found = reach(lambda: (plain, traced)).buffers

    assert {id(buffer) for buffer in plain.buffers()} < {id(b) for b in found}
