"""Arguments are held, and made again as the function found them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from membudget.engine.arguments import HeldArguments
from tests import devices

Pair = namedtuple("Pair", "first second")


class Marked(list):
    """A list with an attribute."""


class Named(dict):
    """A dict with an attribute."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Any
    number: int = 3


@dataclasses.dataclass(slots=True)
class Slotted:
    tensor: Any
    others: list[Any]


@dataclasses.dataclass
class Output(OrderedDict):
    """A dict and a dataclass at once, as the outputs of some libraries are."""

    hidden: Any = None

    def __post_init__(self) -> None:
        self["hidden"] = self.hidden


def rebuilt(*args: Any, **kwargs: Any) -> Any:
    """Return what a recompute gets for some arguments."""
    made, keywords = HeldArguments(args, kwargs).rebuild()
    return (made, keywords) if kwargs else made


@pytest.fixture
def x() -> Tensor:
    return torch.ones(2, requires_grad=True)


def is_like(made: Any, tensor: Tensor) -> bool:
    """Return whether a tensor is a leaf of its own with the same memory."""
    return (
        made is not tensor
        and made.data_ptr() == tensor.data_ptr()
        and made.requires_grad == tensor.requires_grad
        and made.is_leaf
    )


@pytest.mark.parametrize("value", [3, 2.5, True, "text", None, torch.float32, print])
def test_what_is_no_tensor_and_no_container_stands_for_itself(value):
    (made,) = rebuilt(value)
    assert made is value
    made, keywords = rebuilt(value, key=value)
    assert made[0] is keywords["key"] is value


def test_a_tensor_comes_back_with_its_memory_and_without_its_graph(x):
    (made,) = rebuilt(x * 2)
    assert made.grad_fn is None
    assert made.requires_grad
    assert torch.equal(made, x * 2)
    made, keywords = rebuilt(x * 2, key=x)
    assert made[0].grad_fn is None
    assert keywords["key"].requires_grad


def test_a_tensor_that_is_given_twice_is_one_tensor_again(x):
    made, keywords = rebuilt(x, x, [x], key=x)
    first, second, (third,) = made
    assert first is second is third is keywords["key"]
    first, second = rebuilt(x, x.clone())
    assert first is not second
    first, second = rebuilt(x, x)
    assert first is second


def test_each_recompute_gets_containers_of_its_own(x):
    held = HeldArguments(([x],), {"cache": {"x": x}})
    (first,), keywords = held.rebuild()
    first.append(3)
    keywords["cache"].clear()
    (second,), keywords = held.rebuild()
    assert len(second) == 1
    assert list(keywords["cache"]) == ["x"]


def test_what_happens_to_a_container_afterwards_does_not_matter(x):
    parts, table = [x, 1], {"x": x}
    held = HeldArguments((parts, table), {})
    parts.clear()
    table["y"] = 2
    (made, other), _ = held.rebuild()
    assert len(made) == 2
    assert made[1] == 1
    assert list(other) == ["x"]


def test_a_container_that_is_given_twice_is_one_container_again(x):
    shared = [x]
    first, second, third = rebuilt(shared, shared, {"inner": shared})
    assert first is second is third["inner"]
    assert first is not shared


@pytest.mark.parametrize(
    "make",
    [
        lambda t: [t, 3],
        lambda t: (t, 3),
        lambda t: Pair(t, 3),
        lambda t: {"a": t, "b": 3},
        lambda t: OrderedDict(b=t, a=3),
        lambda t: Frozen(t, 4),
        lambda t: Slotted(t, [3]),
        lambda t: [[{"k": (t, [3])}]],
    ],
)
def test_a_container_keeps_its_kind_its_keys_and_its_order(make, x):
    original = make(x)
    (made,) = rebuilt(original)
    assert type(made) is type(original)
    assert made is not original
    assert repr(made) == repr(original)


def test_a_set_of_tensors_is_a_set_of_those_tensors(x):
    (made,) = rebuilt({x})
    (tensor,) = made
    assert type(made) is set
    assert is_like(tensor, x)


def test_attributes_of_containers_come_along(x):
    marked, named = Marked([x]), Named(x=x)
    marked.name = named.name = "mine"  # type: ignore[attr-defined]
    first, second = rebuilt(marked, named)
    assert (type(first), type(second)) == (Marked, Named)
    assert first.name == second.name == "mine"
    assert is_like(first[0], x)
    assert is_like(second["x"], x)


def test_a_dict_that_is_a_record_too_holds_each_tensor_once(x):
    (made,) = rebuilt(Output(hidden=x))
    assert made["hidden"] is made.hidden
    assert is_like(made.hidden, x)


def test_a_frozen_record_is_made_again(x):
    (made,) = rebuilt(Frozen(x))
    assert is_like(made.tensor, x)
    assert made.number == 3


def test_a_container_that_holds_itself_leads_back_to_the_original(x):
    endless: list[Any] = [x]
    endless.append(endless)
    (made,) = rebuilt(endless)
    assert is_like(made[0], x)
    assert made[1] is endless


def test_a_container_without_tensors_is_itself_while_nobody_changes_it():
    numbers, table, record = [1, 2], {"a": 3}, Frozen(1)
    held = HeldArguments((numbers, table, record), {})
    (first, second, third), _ = held.rebuild()
    assert first is numbers
    assert second is table
    assert third is record
    numbers.append(3)
    table["b"] = 4
    (first, second, third), _ = held.rebuild()
    assert first == [1, 2]
    assert second == {"a": 3}
    assert third is record


def test_what_lies_deeper_in_a_container_is_made_again_if_it_changed():
    table = {"a": [3]}
    held = HeldArguments((table,), {})
    table["a"].append(4)
    (made,), _ = held.rebuild()
    assert made == {"a": [3]}


def test_a_dict_in_which_a_key_was_exchanged_is_made_again():
    options = {"flag": True}
    held = HeldArguments((options,), {})
    options["used"] = options.pop("flag")
    assert held.rebuild()[0] == [{"flag": True}]
    options["flag"] = options.pop("used")
    assert held.rebuild()[0][0] is options


def test_a_container_in_which_an_item_was_exchanged_is_made_again():
    numbers = [1.5, 2.5]
    held = HeldArguments((numbers,), {})
    numbers[0] = 9.5
    (made,), _ = held.rebuild()
    assert made == [1.5, 2.5]


def test_the_tensors_and_the_other_objects_are_listed_in_order(x):
    y, z, module, generator = x * 2, x * 3, torch.nn.Tanh(), devices.generator()
    held = HeldArguments((x, [y, module], 3, x), {"a": z, "b": generator, "c": "d"})
    assert [t.data_ptr() for t in (x, y, z)] == [
        t.rebuild().data_ptr() for t in held.tensors
    ]
    assert held.others == [module, generator]
    names = ["argument 0", "argument 1[0]", "argument 'a'"]
    assert [t.name for t in held.tensors] == names


def test_a_name_leads_through_every_container(x):
    held = HeldArguments((1, {"k": [Slotted((x,), [])]}), {})
    assert [t.name for t in held.tensors] == ["argument 1['k'][0]['tensor'][0]"]


def test_only_what_was_changed_since_is_told():
    tensors = [torch.ones(2) for _ in range(3)]
    held = HeldArguments((tensors[0], [tensors[1]]), {"key": tensors[2]})
    assert held.changed() == []
    tensors[1].add_(1)
    assert [t.name for t in held.changed()] == ["argument 1[0]"]
    tensors[2].data = torch.zeros(2)
    assert held.changed()[0].name == "argument 1[0]"


def test_the_devices_are_those_of_the_tensors():
    @dataclasses.dataclass
    class Held:
        device: torch.device

    held = HeldArguments((), {})
    held.tensors += [Held(torch.device(name)) for name in ("cuda:1", "cpu", "cuda:0")]  # type: ignore[misc]
    assert list(map(str, held.devices())) == ["cuda:1", "cuda:0"]
    assert HeldArguments((torch.ones(1),), {}).devices() == []
