"""Behaviours 130-137: regions are put on a model, which stays what it was.

Both ways are tested: `mb.apply`, and torch's `checkpoint_wrapper` and
`apply_activation_checkpointing` as `compat` has them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import compat
from tests.behaviours.steps import Region, differences, plain


class Layer(nn.Module):
    """A layer that counts its forwards, with an attribute and an index."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        CALLS.append(self.width)
        return (self.norm(self.linear(x)) * scale).exp().sin()

    def __getitem__(self, index: int) -> nn.Module:
        return [self.linear, self.norm][index]

    def describe(self) -> str:
        return f"a layer of width {self.width}"


CALLS: list[int] = []


class Model(nn.Module):
    """Three layers in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, Layer)


def with_apply(model: Model) -> None:
    mb.apply(model, blocks=Layer, engine="rerun")


def with_check(model: Model) -> None:
    wrap = functools.partial(compat.checkpoint_wrapper, engine="rerun")
    compat.apply_activation_checkpointing(model, wrap, check_fn=is_layer)


def with_wrapper(model: Model) -> None:
    for i, layer in enumerate(model.layers):
        model.layers[i] = compat.checkpoint_wrapper(layer, engine="rerun")


Put = Callable[[Model], None]
WAYS = pytest.mark.parametrize("put", [with_apply, with_check, with_wrapper])


def made(put: Put | None = None) -> Model:
    """Return a model from seed 3, with regions if `put` is given."""
    torch.manual_seed(3)
    model = Model()
    if put is not None:
        put(model)
    return model


def calls_of_a_step(model: nn.Module, x: Tensor | None = None) -> int:
    """Return how often layers ran in a forward and backward."""
    CALLS.clear()
    model(torch.randn(4, 6) if x is None else x).sum().backward()
    return len(CALLS)


# torch 2.13 advances the statistics of BatchNorm twice; else it does this.
@WAYS
def test_b130_regions_recompute_and_equal_the_plain_model(put: Put) -> None:
    def step(region: Region) -> Any:
        model, x = made(None if region is plain else put), torch.randn(4, 6)
        assert calls_of_a_step(model, x) == (3 if region is plain else 6)
        return list(model.parameters()), list(model.buffers())

    assert differences(step) == []


@WAYS
def test_b130_state_dicts_have_the_same_keys_and_load_both_ways(put: Put) -> None:
    bare, budgeted = made(), made(put)
    assert list(budgeted.state_dict()) == list(bare.state_dict())
    calls_of_a_step(bare)
    budgeted.load_state_dict(bare.state_dict(), strict=True)
    for name, value in bare.state_dict().items():
        assert torch.equal(budgeted.state_dict()[name], value)
    made().load_state_dict(budgeted.state_dict(), strict=True)
    assert calls_of_a_step(budgeted) == 6


@WAYS
def test_b131_keywords_attributes_and_indices_reach_the_module(put: Put) -> None:
    model, x = made(put), torch.randn(4, 6)
    scale = torch.tensor(2.0, requires_grad=True)
    layer: Any = model.layers[1]
    layer(x, scale=scale).sum().backward()
    reference = made().layers[1]
    expected = torch.tensor(2.0, requires_grad=True)
    reference(x, scale=expected).sum().backward()
    assert scale.grad is not None
    assert expected.grad is not None
    assert torch.equal(scale.grad, expected.grad)
    assert layer.width == 6
    assert layer.describe() == "a layer of width 6"
    assert layer[1] is layer.norm


def through_pickle(model: Model) -> Model:
    copied: Model = pickle.loads(pickle.dumps(model))
    return copied


def through_torch_save(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: Model = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, through_pickle, through_torch_save]
)
@pytest.mark.parametrize("after_a_step", [False, True])
@WAYS
def test_b132_a_copy_is_a_model_of_its_own(
    put: Put, after_a_step: bool, duplicate: Callable[[Model], Model]
) -> None:
    model, x = made(put), torch.randn(4, 6)
    if after_a_step:
        calls_of_a_step(model)
        model.zero_grad()
    copied = duplicate(model)
    expected = copy.deepcopy(made())
    expected.load_state_dict(model.state_dict())
    calls_of_a_step(copied, x)
    calls_of_a_step(expected, x)
    pairs = zip(copied.parameters(), expected.parameters(), strict=True)
    for other, parameter in pairs:
        assert other.grad is not None
        assert parameter.grad is not None
        assert torch.equal(other.grad, parameter.grad)
    # The gradients and statistics of the original are its own.
    assert all(parameter.grad is None for parameter in model.parameters())
    assert calls_of_a_step(model) == 6


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ({"blocks": Layer}, ["layers.0", "layers.1", "layers.2"]),
        ({"blocks": Layer, "every": 2}, ["layers.0", "layers.2"]),
        (
            {"blocks": (nn.BatchNorm1d, nn.ModuleDict)},
            [f"layers.{i}.norm" for i in range(3)],
        ),
        ({"names": "layers.*"}, ["layers.0", "layers.1", "layers.2"]),
        ({"names": ["layers.1", "head"]}, ["layers.1", "head"]),
        ({"where": lambda name, module: name.endswith("2")}, ["layers.2"]),
        ({"blocks": Layer, "names": "*.1"}, ["layers.1"]),
    ],
)
def test_b133_apply_puts_regions_on_what_it_is_asked_for(
    selection: dict[str, Any], names: list[str]
) -> None:
    model = made()
    applied = mb.apply(model, **selection)
    assert [region.name for region in applied.status().regions] == names
    calls_of_a_step(model)
    for region in applied.status().regions:
        assert (region.forwards, region.recomputes, region.skipped) == (1, 1, 0)


def test_b133_a_check_function_says_which_modules_recompute() -> None:
    model = made()
    chosen = model.layers[1]
    wrap = functools.partial(compat.checkpoint_wrapper, engine="rerun")
    compat.apply_activation_checkpointing(model, wrap, check_fn=lambda m: m is chosen)
    assert calls_of_a_step(model) == 4


# torch 2.13 says nothing and checkpoints nothing.
@pytest.mark.parametrize(
    "selection",
    [{"blocks": nn.Conv2d}, {"names": "h.*"}, {"where": lambda name, module: False}],
)
def test_b133_a_selection_that_matches_nothing_is_refused(
    selection: dict[str, Any],
) -> None:
    model = made()
    with pytest.raises(mb.SelectionError, match="Model"):
        mb.apply(model, **selection)
    assert calls_of_a_step(model) == 3


# torch 2.13 has no way back.
def test_b133_regions_are_taken_off_again() -> None:
    model = made()
    before = {name: type(module) for name, module in model.named_modules()}
    applied = mb.apply(model, blocks=Layer, engine="rerun")
    assert calls_of_a_step(model) == 6
    applied.remove()
    assert calls_of_a_step(model) == 3
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not [key for layer in model.layers for key in vars(layer) if "budget" in key]
    applied.remove()


# torch 2.13: as of 130.
@WAYS
def test_b134_the_state_of_an_optimizer_survives(put: Put) -> None:
    def step(region: Region) -> Any:
        model = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for i in range(4):
            if i == 2 and region is not plain:
                put(model)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
        return list(model.parameters()), list(model.buffers()), optimizer.state_dict()

    assert differences(step) == []


# torch 2.13 puts a wrapper module between, whose name is in every name below it.
@WAYS
def test_b135_names_seen_from_the_parent_are_unchanged(put: Put) -> None:
    bare, budgeted = made(), made(put)
    for kind in ("modules", "children", "parameters", "buffers"):
        expected = [name for name, _ in getattr(bare, f"named_{kind}")()]
        assert [name for name, _ in getattr(budgeted, f"named_{kind}")()] == expected
    assert repr(budgeted) == repr(bare)
    assert budgeted.get_parameter("layers.1.linear.weight").shape == (6, 6)


# torch 2.13: the wrapper is another class.
@WAYS
def test_b136_isinstance_holds(put: Put) -> None:
    model = made(put)
    assert all(isinstance(layer, Layer) for layer in model.layers)
    assert [type(layer).__name__ for layer in model.layers] == ["Layer"] * 3


# torch 2.13 has no such switch.
@WAYS
def test_b137_checkpointing_can_be_switched_off_for_a_while(put: Put) -> None:
    model = made(put)
    with mb.disable_checkpointing():
        assert calls_of_a_step(model) == 3
        with compat.disable_checkpointing():
            assert calls_of_a_step(model) == 3
        assert calls_of_a_step(model) == 3
    assert calls_of_a_step(model) == 6


# torch 2.13: as above.
def test_b137_the_switch_belongs_to_the_forward_and_ends_with_an_exception() -> None:
    model = made(with_apply)
    CALLS.clear()
    with contextlib.suppress(KeyError), mb.disable_checkpointing():
        loss = model(torch.randn(4, 6)).sum()
        raise KeyError
    loss.backward()
    assert len(CALLS) == 3
    CALLS.clear()
    loss = model(torch.randn(4, 6)).sum()
    with mb.disable_checkpointing():
        loss.backward()
    assert len(CALLS) == 6
