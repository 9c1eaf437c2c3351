"""A profile restores everything, also when the step fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget._torch import dispatch_modes, top_saved_tensors_hooks
from membudget.profile import profile
from membudget.state.rng import frozen, global_streams
from tests.untidy import Untidy


def python_state(model: Untidy) -> Any:
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
        for m in model.modules()
    ]
    modes = [m.training for m in model.modules()]
    held = sorted(vars(model)), model.calls, str(model.table), list(model.recent)
    return hooks, modes, held, set(model.known), model.late


def streams(model: Untidy) -> dict[str, Any]:
    states = {name: frozen(s.read()) for name, s in global_streams().items()}
    return states | {"own": frozen(model.generator.get_state())}


def tensors(model: Untidy, x: Tensor) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {**named, "loose": model.loose, "x": x}


def with_gradients() -> tuple[Untidy, Tensor]:
    model, x = Untidy(), torch.randn(5, 4, requires_grad=True)
    for parameter in [*model.parameters()][:-1]:
        parameter.grad = torch.randn_like(parameter)
    x.grad = torch.randn_like(x)
    return model, x


def fails_in_the_loss(output: Any, batch: Any) -> Tensor:
    raise KeyError("mine")


def fails_in_the_backward(output: Any, batch: Any) -> Tensor:
    def fail(gradient: Tensor) -> Tensor:
        raise KeyError("mine")

    output.register_hook(fail)
    return output.sum()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    "fails", ["nowhere", "in the forward", "in the loss", "in the backward"]
)
def test_everything_is_restored(fake, fails):
    model, x = with_gradients()
    before = tensors(model, x)
    contents = {name: t.detach().clone() for name, t in before.items()}
    gradients = {name: t.grad for name, t in before.items()}
    of_gradients: dict[str, Any] = {
        n: None if g is None else g.clone() for n, g in gradients.items()
    }
    python, random_states = python_state(model), streams(model)
    loss: Any = {
        "in the loss": fails_in_the_loss,
        "in the backward": fails_in_the_backward,
    }.get(fails)

    if fails == "nowhere":
        profile(model, x, fake=fake, optimizer=torch.optim.AdamW, device="h100")
    else:
        handle = None
        if fails == "in the forward":
            handle = model.norm.register_forward_hook(fails_in_the_loss_hook)
            python = python_state(model)
        with pytest.raises(KeyError, match="mine"):
            profile(model, x, loss, fake=fake, device="h100")
        if handle is not None:
            assert len(model.norm._forward_hooks) == 1

    after = tensors(model, x)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor is before[name], name
        assert torch.equal(tensor, contents[name]), name
        assert tensor.grad is gradients[name], name
        if tensor.grad is not None:
            assert torch.equal(tensor.grad, of_gradients[name]), name
    assert python_state(model) == python
    assert streams(model) == random_states
    assert dispatch_modes() == ()
    assert top_saved_tensors_hooks() is None


def fails_in_the_loss_hook(module: nn.Module, args: Any, output: Any) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad]
)
def test_an_optimizer_is_left_alone(fake, kind):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {id(p): dict(s) for p, s in optimizer.state.items()}
    contents = {
        (id(p), k): v.clone()
        for p, s in optimizer.state.items()
        for k, v in s.items()
        if isinstance(v, Tensor)
    }
    groups = [dict(group) for group in optimizer.param_groups]

    profile(model, x, fake=fake, optimizer=optimizer, device="h100")

    assert {id(p) for p in optimizer.state} == before.keys()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert value is before[id(parameter)][key]
            if isinstance(value, Tensor):
                assert torch.equal(value, contents[id(parameter), key])
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.cpu_only("a model on `meta` is taken to be on the CPU")
def test_a_fake_profile_takes_no_memory_of_activations():
    layers = [nn.Linear(8, 1 << 20, bias=False), nn.GELU(), nn.Linear(1 << 20, 8)]
    model = nn.Sequential(*layers).to("meta")
    x = torch.randn(1 << 16, 8)

    measured = mb.peak(lambda: profile(model, x, device="h100"))

    assert measured.result.peak_bytes > 1 << 38
    assert measured.peak_bytes < 1 << 20
    assert all(p.is_meta and p.grad is None for p in model.parameters())


def test_a_fake_profile_of_real_parameters_takes_little_memory():
    model, x = nn.Sequential(nn.Linear(8, 4096), nn.GELU()), torch.randn(4096, 8)

    measured = mb.peak(lambda: profile(model, x, fake=True, device="h100"))

    assert measured.result.peak_bytes > 1 << 27
    assert measured.peak_bytes < 1 << 20


@pytest.mark.cpu_only("a model on `meta` is taken to be on the CPU")
@pytest.mark.parametrize("fails", [False, True])
def test_parameters_on_meta_stay_where_they_are(fails):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to("meta")
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    x = torch.randn(3, 4)

    if fails:
        with pytest.raises(KeyError, match="mine"):
            profile(model, x, fails_in_the_loss)
    else:
        profile(model, x)

    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(t.is_meta and t.grad is None for t in after.values())
