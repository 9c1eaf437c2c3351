"""The optimizer's bytes are those that the real one holds after a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import membudget as mb
from membudget._torch import tree_iter
from membudget._torch_accelerator import counts_on
from membudget.memory import storage_bytes
from membudget.profile import profile
from tests.devices import default_device, is_cpu

FAKE = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])

KINDS: list[Any] = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "foreach": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "foreach": False}),
    (optim.Adam, {"fused": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"fused": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.NAdam, {}),
    (optim.NAdam, {"foreach": True}),
    (optim.Muon, {}),
    (optim.Adafactor, {}),
    (optim.ASGD, {}),
    (optim.Adam, {"lr": torch.tensor(0.1)}),
]


def network() -> tuple[nn.Module, torch.Tensor]:
    # Muon takes matrices alone.
    layers = [nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)]
    return nn.Sequential(*layers), torch.randn(2, 8)


def held_bytes(optimizer: optim.Optimizer) -> int:
    """Return the bytes of the state, without counters that a device leaves on a CPU."""
    leaves = tree_iter(dict(optimizer.state))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return storage_bytes(t for t in tensors if counts_on(default_device(), t.device))


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
@FAKE
def test_the_state_is_that_of_the_real_optimizer(kind, options, fake, is_used):
    model, x = network()
    optimizer = kind(model.parameters(), **options)
    if is_used:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = profile(model, x, optimizer=optimizer, fake=fake, device="h100")

    model(x).sum().backward()
    optimizer.step()
    assert found.graph.static.optimizer == held_bytes(optimizer)


@FAKE
def test_each_group_has_its_own_options(fake):
    model, x = network()
    first, second = model.parameters()
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": [second], "amsgrad": True},
    ]
    optimizer = optim.Adam(groups)

    found = profile(model, x, optimizer=optimizer, fake=fake, device="h100")

    steps = 2 * 4 if is_cpu() else 0
    state = 2 * first.nbytes + 3 * second.nbytes + steps
    assert found.graph.static.optimizer == state


def test_parameters_of_other_models_do_not_count():
    model, x = network()
    others = nn.Linear(100, 100)
    optimizer = optim.SGD([*model.parameters(), *others.parameters()], momentum=0.9)

    found = profile(model, x, optimizer=optimizer, device="h100")

    assert found.graph.static.optimizer == sum(p.nbytes for p in model.parameters())


def test_parameters_without_a_gradient_have_no_state():
    model, x = network()
    model[0].requires_grad_(False)  # type: ignore[index]

    found = profile(model, x, optimizer=optim.RMSprop, device="h100")

    assert found.graph.static.optimizer == 16 * 4 * 4 + 4


def test_an_optimizer_over_other_parameters_is_rejected():
    model, x = network()
    optimizer = optim.SGD(nn.Linear(2, 2).parameters())

    with pytest.raises(mb.OptionError, match=r"^the SGD has none of the model's"):
        profile(model, x, optimizer=optimizer, device="h100")


def test_an_optimizer_class_that_cannot_step_is_named():
    model, x = network()

    with pytest.raises(mb.OptionError, match=r"^LBFGS cannot take a step"):
        profile(model, x, optimizer=optim.LBFGS, device="h100")


@pytest.mark.parametrize("junk", ["adam", 3, lambda parameters: None])
def test_an_optimizer_of_another_type_is_rejected(junk):
    model, x = network()

    with pytest.raises(mb.OptionError, match="optimizer"):
        profile(model, x, optimizer=junk, device="h100")


@pytest.mark.cpu_only("emu has no sparse tensors")
@pytest.mark.parametrize("kind", [optim.SGD, optim.SparseAdam, optim.Adagrad])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad makes some.
def test_sparse_gradients_are_supported(kind):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
    optimizer = kind(model.parameters(), lr=0.1)
    tokens = torch.arange(4)

    found = profile(model, tokens, optimizer=optimizer, fake=False, device="h100")

    model(tokens).sum().backward()
    optimizer.step()
    assert found.graph.static.optimizer == held_bytes(optimizer)


@FAKE
def test_optimizer_operators_come_last_and_work_on_the_parameters(fake):
    model, x = network()

    graph = profile(model, x, optimizer=optim.AdamW, fake=fake, device="h100").graph

    phases = [o.phase for o in graph.operators]
    assert phases[graph.optimizer_start :] == ["optimizer"] * (
        len(phases) - graph.optimizer_start
    )
    assert "optimizer" not in phases[: graph.optimizer_start]
    read = {
        graph.storages[graph.values[v].storage].name
        for o in graph.operators[graph.optimizer_start :]
        for v in o.inputs
    }
    assert {"0.weight", "2.weight"} <= read
