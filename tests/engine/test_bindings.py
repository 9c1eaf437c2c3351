"""A name that other code binds between a forward and its recompute is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import membudget as mb
from membudget.engine import bindings
from membudget.engine.reach import reach
from membudget.errors import ChangedSinceForwardError

CALLS = 11  # The last is none of the calls 1, 2, 4 and 8, which are verified.
WEIGHT = torch.tensor(2.0)


class Block(nn.Module):
    """Reads a parameter of a child, and an item of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(5, 5, bias=False)
        self.items = [torch.tensor(2.0)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.child(x) * self.items[0]).sin()


class Places:
    """Where a region's function finds its weight, and how other code binds it."""

    def __init__(self) -> None:
        self.block = Block()
        self.object = SimpleNamespace(weight=torch.tensor(2.0))
        self.list = [torch.tensor(2.0)]
        self.dict = {"weight": torch.tensor(2.0)}
        weight = torch.tensor(2.0)

        def cell(x: Tensor) -> Tensor:
            return (x * weight).sin()

        def bind(value: Tensor) -> None:
            nonlocal weight
            weight = value

        def default(x: Tensor, weight: Tensor = WEIGHT) -> Tensor:
            return (x * weight).sin()

        self.functions: dict[str, Callable[[Tensor], Tensor]] = {
            "cell": cell,
            "default": default,
            "global": lambda x: (x * WEIGHT).sin(),
            "object": lambda x: (x * self.object.weight).sin(),
            "list": lambda x: (x * self.list[0]).sin(),
            "dict": lambda x: (x * self.dict["weight"]).sin(),
            "item-of-a-module": self.block,
            "child": self.block,
            "parameters": self.block,
        }
        self.bindings: dict[str, Callable[[], Any]] = {
            "cell": lambda: bind(torch.tensor(3.0)),
            "default": lambda: setattr(default, "__defaults__", (torch.tensor(3.0),)),
            "global": lambda: globals().update(WEIGHT=torch.tensor(3.0)),
            "object": lambda: setattr(self.object, "weight", torch.tensor(3.0)),
            "list": lambda: self.list.__setitem__(0, torch.tensor(3.0)),
            "dict": lambda: self.dict.update(weight=torch.tensor(3.0)),
            "item-of-a-module": lambda: self.block.items.__setitem__(
                0, torch.tensor(3.0)
            ),
            "child": lambda: setattr(self.block, "child", nn.Linear(5, 5, bias=False)),
            "parameters": lambda: self.block.child.__dict__.update(
                _parameters={"weight": nn.Parameter(torch.eye(5)), "bias": None}
            ),
        }


@pytest.mark.parametrize("engine", ["rerun", "auto"])
@pytest.mark.parametrize("place", list(Places().functions))
def test_rule8_a_name_that_other_code_binds_is_an_error_if_it_is_read(place, engine):
    places = Places()
    function = places.functions[place]
    x = torch.linspace(0, 1, 5, requires_grad=True)
    for _ in range(CALLS - 1):
        mb.checkpoint(function, x, engine=engine).sum().backward()
    output = mb.checkpoint(function, x, engine=engine)
    places.bindings[place]()

    with pytest.raises(ChangedSinceForwardError, match="was changed after the forward"):
        output.sum().backward()


def reaches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Count the walks that a recompute takes."""
    walks: list[Any] = []

    def counting(*args: Any) -> Any:
        walks.append(args)
        return reach(*args)

    monkeypatch.setattr(bindings, "reach", counting)
    return walks


@pytest.mark.parametrize("place", list(Places().functions))
def test_a_recompute_walks_again_only_if_a_name_was_bound(place, monkeypatch):
    places = Places()
    x = torch.linspace(0, 1, 5, requires_grad=True)
    for is_bound in (False, True):
        output = mb.checkpoint(places.functions[place], x, engine="rerun", verify=False)
        if is_bound:
            places.bindings[place]()
        walks = reaches(monkeypatch)
        with suppress(ChangedSinceForwardError):
            output.sum().backward()
        assert bool(walks) == is_bound


class Remembering(nn.Module):
    """Stores a tensor that has a history."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.weight = nn.Parameter(torch.linspace(0, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.last = (x * self.weight).sin()
        return self.last * 2


def test_rule10_what_a_forward_stores_on_its_module_dies_when_it_is_replaced():
    module = Remembering()
    x = torch.linspace(0, 1, 5, requires_grad=True)
    mb.checkpoint(module, x, engine="rerun", verify=False).sum().backward()
    replaced = weakref.ref(module.last)
    gc.collect()
    gc.disable()
    try:
        output = mb.checkpoint(module, x, engine="rerun", verify=False)
        assert replaced() is None
    finally:
        gc.enable()
    output.sum().backward()


@pytest.mark.parametrize("place", list(Places().functions))
def test_rule8_a_replay_reads_what_the_forward_read(place):
    places = Places()
    function = places.functions[place]
    x = torch.linspace(0, 1, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    output = mb.checkpoint(function, x, engine="replay")
    places.bindings[place]()

    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


def test_rule8_a_name_that_is_bound_anew_and_not_read_is_no_error():
    log = [torch.tensor(0.0)]

    def function(x: Tensor) -> Tensor:
        if not x.requires_grad:
            log.append(x)
        return x.sin().exp()

    for _ in range(CALLS):
        x = torch.linspace(0, 1, 5, requires_grad=True)
        output = mb.checkpoint(function, x, engine="rerun")
        log[0] = output.detach()
        output.sum().backward()


@pytest.mark.parametrize("holder", ["dict", "object"])
def test_rule8_a_cache_that_the_forward_fills_is_read_by_the_recompute(holder):
    cached: dict[int, Tensor] = {}
    kept = SimpleNamespace(mask=None, size=0)

    def mask(size: int) -> Tensor:
        if holder == "dict":
            if size not in cached:
                cached[size] = torch.arange(5.0) * size
            return cached[size]
        if kept.size != size:
            kept.mask, kept.size = torch.arange(5.0) * size, size
        assert kept.mask is not None
        return kept.mask

    def function(x: Tensor, size: int) -> Tensor:
        return (x * mask(size)).sin()

    for size in range(1, 2 * CALLS):
        x = torch.linspace(0, 1, 5, requires_grad=True)
        (expected,) = torch.autograd.grad(
            (x * (torch.arange(5.0) * size)).sin().sum(), x
        )
        output = mb.checkpoint(function, x, size, engine="rerun")
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)


@pytest.mark.parametrize("engine", ["rerun", "auto", "replay"])
def test_rule5_parameters_that_functional_call_swaps_in_are_recomputed_with(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(8, 4)

    def gradients(scale: float) -> list[Tensor]:
        model.zero_grad()
        weights: dict[str, Tensor] = dict(model.named_parameters())
        if scale != 1:
            weights = {name: value * scale for name, value in weights.items()}
        torch.func.functional_call(model, weights, (x,)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(1.5)
    model.requires_grad_()
    mb.apply(model, names="*", engine=engine)
    for _ in range(CALLS - 1):
        gradients(1)
    found = gradients(1.5)

    assert len(found) == len(expected) == 4
    assert all(map(torch.equal, found, expected))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


class Averaged(nn.Module):
    """Binds an attribute to a new tensor in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(5)
        self.other = torch.ones(5)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach()
        return (x - self.mean) * x * self.other


def test_rule5_an_attribute_that_each_forward_binds_is_restored():
    plain, region = Averaged(), Averaged()
    x = torch.linspace(0, 1, 5, requires_grad=True)
    for _ in range(CALLS):
        (expected,) = torch.autograd.grad(plain(x).sum(), x)
        output = mb.checkpoint(region, x, engine="rerun")
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
        assert torch.equal(region.mean, plain.mean)


def test_rule8_two_names_that_exchange_their_tensors_are_noticed():
    pair = [torch.full((5,), 2.0), torch.full((5,), 3.0)]

    def function(x: Tensor) -> Tensor:
        return (x * pair[0] + pair[1]).sin()

    x = torch.linspace(0, 1, 5, requires_grad=True)
    for _ in range(CALLS - 1):
        mb.checkpoint(function, x, engine="rerun").sum().backward()
    output = mb.checkpoint(function, x, engine="rerun")
    pair.reverse()

    with pytest.raises(ChangedSinceForwardError, match="was changed after the forward"):
        output.sum().backward()


class Pair(nn.Module):
    """Multiplies what two children compute."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.other = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) * self.other(x)).sin()


def three() -> list[Any]:
    rows = torch.linspace(1, 2, 15).view(3, 5)
    return [row.clone() for row in rows]


def two_modules() -> list[Any]:
    return [nn.Linear(5, 5), nn.Linear(5, 5)]


def gradient_after(items: Any, read: Any, bind: Any, **options: Any) -> Tensor:
    """Return a gradient that is taken after a name was bound to something else."""
    x = torch.linspace(0.1, 1, 5, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        output: Tensor = read(items, x).sin()
        return output

    for _ in range(CALLS - 1):
        torch.autograd.grad(mb.checkpoint(function, x, **options).sum(), x)
    output = mb.checkpoint(function, x, **options)
    bind(items)
    return torch.autograd.grad(output.sum(), x)[0]


def first(items: list[Any], x: Tensor) -> Tensor:
    return items[0](x) if callable(items[0]) else items[0] * x


def second(items: list[Any], x: Tensor) -> Tensor:
    return items[1](x) if callable(items[1]) else items[1] * x


def last(items: list[Any], x: Tensor) -> Tensor:
    product: Tensor = items[-1] * x
    return product


def copy_item(items: list[Any], source: int, target: int) -> None:
    items[target] = items[source]


REBOUND = {
    "a tensor that another index holds": (three, second, lambda t: copy_item(t, 0, 1)),
    "a module that another index holds": (
        two_modules,
        second,
        lambda t: copy_item(t, 0, 1),
    ),
    "a child that another name has": (
        Pair,
        Pair.forward,
        lambda pair: setattr(pair, "other", pair.one),
    ),
    "another view of the same storage": (
        lambda: [*torch.linspace(1, 2, 15).view(3, 5)],
        first,
        lambda t: copy_item(t, 1, 0),
    ),
    "the last of a list that was shortened": (three, last, lambda t: t.pop()),
    "an index whose items moved up": (three, first, lambda t: t.pop(0)),
    "an index whose items moved down": (
        three,
        second,
        lambda t: t.insert(0, torch.ones(5)),
    ),
    "an index whose modules moved up": (two_modules, first, lambda t: t.pop(0)),
    "an index whose child modules moved up": (
        lambda: nn.ModuleList(two_modules()),
        first,
        lambda t: t.pop(0),
    ),
    "an index whose child modules moved down": (
        lambda: nn.Sequential(*two_modules()),
        second,
        lambda t: t.insert(0, nn.Linear(5, 5)),
    ),
}


@pytest.mark.parametrize("name", REBOUND)
def test_rule8_a_name_bound_to_what_the_region_knew_by_another_name_is_an_error(name):
    make, read, bind = REBOUND[name]
    with pytest.raises(ChangedSinceForwardError, match="was changed after the forward"):
        gradient_after(make(), read, bind, engine="rerun")


@pytest.mark.parametrize("name", REBOUND)
def test_rule8_a_replay_reads_the_items_that_the_forward_read(name):
    make, read, bind = REBOUND[name]
    torch.manual_seed(0)
    items = make()
    expected = gradient_after(items, read, lambda items: None, engine="replay")
    found = gradient_after(items, read, bind, engine="replay")
    assert torch.equal(found, expected)


def test_rule8_a_list_that_other_code_extends_may_be_read():
    items = three()
    expected = gradient_after(items, first, lambda items: None, engine="rerun")
    found = gradient_after(
        items, first, lambda t: t.append(torch.ones(5)), engine="rerun"
    )
    assert torch.equal(found, expected)


OLD_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "normalised": nn.utils.weight_norm,
    "spectral": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("hook", OLD_HOOKS)
@pytest.mark.parametrize("names", ["0", "0.0", ["0", "0.0"]])
@pytest.mark.parametrize("verify", [True, False])
def test_a_weight_that_a_hook_binds_is_that_of_the_forward(hook, names, verify):
    """Before each forward, and so between one and its recompute, if two come before."""

    def trained(has_regions: bool) -> list[Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(OLD_HOOKS[hook](nn.Linear(8, 8)), nn.GELU())
        model = nn.Sequential(inner, nn.Linear(8, 8))
        if has_regions:
            mb.apply(model, names=names, engine="rerun", verify=verify)
        for x in torch.randn(3, 4, 8):
            loss = model(x).sum() + model(2 * x).square().sum()
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*gradients, *model.buffers()]

    assert all(map(torch.equal, trained(False), trained(True)))
