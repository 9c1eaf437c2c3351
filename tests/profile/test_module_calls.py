"""A call of a module is what its forward runs, without what hooks of the module run."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

import membudget as mb
from membudget._torch_modules import has_forward_hooks


class Blocks(nn.Module):
    """Two layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


def names(model: nn.Module, path: str) -> list[str]:
    graph = mb.profile(model, torch.ones(2, 4), fake=True).graph
    (call,) = (call for call in graph.calls if call.path == path)
    return [o.name for o in graph.operators[call.start : call.end]]


def test_operators_of_hooks_lie_outside_of_the_call() -> None:
    model: Any = Blocks()
    plain = {path: names(model, path) for path in ("first", "second")}
    assert not has_forward_hooks(model.first)
    model.first.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    model.first.register_forward_hook(lambda module, args, output: output.cos())

    assert has_forward_hooks(model.first)
    assert {path: names(model, path) for path in plain} == plain
    assert {"aten.sin.default", "aten.cos.default"} <= {*names(model, "")}


def test_noting_calls_leaves_no_hook() -> None:
    model: Any = Blocks()
    handle = model.first.register_forward_hook(lambda *_: None)
    names(model, "first")
    handle.remove()

    assert not any(map(has_forward_hooks, model.modules()))


class Refusing(nn.Linear):
    """Refuses further hooks, as scripted modules do."""

    def register_forward_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("no hooks here")


def test_a_module_that_refuses_hooks_leaves_none_of_those_of_others() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), Refusing(4, 4))
    for module in model:
        module.register_forward_pre_hook(lambda *_: None)
    hooks = [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
    before = [dict(of) for of in hooks]

    with pytest.raises(RuntimeError, match="no hooks here"):
        mb.profile(model, torch.ones(2, 4), fake=True)

    assert hooks == before
    assert [len(module._forward_pre_hooks) for module in model] == [1, 1]


class Mapped(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.second(row).tanh())(self.first(x)).sum()


def test_a_call_inside_a_transform_is_none_to_plan_for() -> None:
    profile = mb.profile(Mapped(), torch.ones(2, 4))
    assert [call.path for call in profile.graph.calls] == ["", "first"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_call_of_torchscript_is_none_to_plan_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    profile = mb.profile(model, torch.ones(2, 4))
    assert [call.path for call in profile.graph.calls] == ["", "0"]


class Energy(nn.Module):
    """Takes a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.inner(x).tanh().square().sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return (x - gradient).sin()


def test_the_forward_of_a_step_function_does_not_end_inside_a_part_of_its_model():
    model, x = nn.Sequential(nn.Linear(4, 4), Energy(), Energy()), torch.ones(2, 4)
    written = mb.profile(lambda: model(x).sum().backward(), modules=model).graph
    given = mb.profile(model, x, lambda output, _: output.sum()).graph
    # The gradient of the loss is made before autograd runs.
    assert written.backward_start == given.backward_start + 1
    assert written.calls == given.calls
