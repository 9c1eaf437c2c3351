"""Row 23: wrapping alters the model.

A wrapper module changes the names that `named_parameters` and `named_modules` give, and
`isinstance`; applied twice it nests. So weight decay by name, moving averages by name
and adapters by class miss their layers. Ours leaves no trace that a user can see, and
nothing at all after `remove()`.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import membudget as mb
from tests.faults.implementations import are_equal, gradients, torch_fails

# Forwards of all blocks since the last reset; outside of the model, so that copies and
# pickles of a block need not take it along.
forwards = 0


class Block(nn.Module):
    """One layer, with a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        global forwards
        forwards += 1
        return torch.tanh(self.linear(x) * self.scale)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Dropout(0.5), Block())


def appearance(model: nn.Module) -> dict[str, Any]:
    """Return what a user can ask a model about its parts."""
    return {
        "state": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "blocks": [isinstance(module, Block) for module in model.modules()],
        "classes": [type(module).__qualname__ for module in model.modules()],
        "text": repr(model),
    }


def insides(model: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    """Return each module's type and a copy of its attributes, dicts copied too."""
    return [
        (
            type(module),
            {
                key: dict(value) if isinstance(value, dict) else value
                for key, value in vars(module).items()
            },
        )
        for module in model.modules()
    ]


def step(model: nn.Module) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    return gradients(model)


def forwards_of_a_step(model: nn.Module) -> int:
    global forwards
    forwards = 0
    step(model)
    return forwards


def test_row23_names_and_classes_are_unchanged() -> None:
    model = make_model()
    before = appearance(model)
    mb.apply(model, blocks=Block)

    assert appearance(model) == before


def test_row23_applying_twice_is_one_application() -> None:
    # Without early stop, because with it a region around a region costs no forward.
    model = make_model()
    mb.apply(model, blocks=Block, early_stop=False)
    once = forwards_of_a_step(model)
    mb.apply(model, blocks=Block, early_stop=False)

    assert once == 4
    assert forwards_of_a_step(model) == once


def test_row23_remove_restores_everything() -> None:
    model = make_model()
    before = insides(model)
    applied = mb.apply(model, blocks=Block)
    step(model)
    applied.remove()
    model.zero_grad()

    assert insides(model) == before
    assert forwards_of_a_step(model) == 2


def test_row23_removing_twice_is_harmless() -> None:
    model = make_model()
    before = insides(model)
    applied = mb.apply(model, blocks=Block)
    applied.remove()
    applied.remove()

    assert insides(model) == before


def test_row23_remove_after_a_second_application_restores_everything() -> None:
    model = make_model()
    before = insides(model)
    first = mb.apply(model, blocks=Block)
    second = mb.apply(model, blocks=Block)
    second.remove()
    first.remove()

    assert insides(model) == before


def test_row23_state_dict_loads_both_ways() -> None:
    applied, plain = make_model(), make_model()
    mb.apply(applied, blocks=Block)

    assert applied.load_state_dict(plain.state_dict())
    assert plain.load_state_dict(applied.state_dict())


def test_row23_copy_trains_by_itself() -> None:
    model = make_model()
    expected = step(model)
    model.zero_grad()
    mb.apply(model, blocks=Block)
    twin = copy.deepcopy(model)

    assert are_equal(step(twin), expected)
    assert all(p.grad is None for p in model.parameters())
    assert appearance(twin) == appearance(model)


def test_row23_copy_outlives_the_removal_of_the_original() -> None:
    model = make_model()
    expected = step(model)
    applied = mb.apply(model, blocks=Block)
    twin = copy.deepcopy(model)
    applied.remove()

    assert are_equal(step(twin), expected)


def test_row23_pickle_trains_as_before() -> None:
    model = make_model()
    expected = step(model)
    mb.apply(model, blocks=Block)
    loaded = pickle.loads(pickle.dumps(model))

    assert are_equal(step(loaded), expected)
    assert appearance(loaded) == appearance(model)


def torch_wrapped(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper),
        check_fn=lambda module: isinstance(module, Block),
    )
    return model


@torch_fails
def test_row23_torch_changes_names_and_classes() -> None:
    before = appearance(make_model())
    after = appearance(torch_wrapped(make_model()))

    assert after["state"] == before["state"]
    for what in ("modules", "blocks", "classes", "text"):
        assert after[what] != before[what], what


@torch_fails
def test_row23_torch_nests_four_wrappers_when_applied_twice() -> None:
    model = torch_wrapped(torch_wrapped(make_model()))
    wrappers = [m for m in model.modules() if type(m).__name__ == "CheckpointWrapper"]

    assert len(wrappers) == 4
