"""Row B10: what code written for torch's modules asks of ours."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpointing
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import (
    checkpoint_wrapper as torch_wrapping,
)

import membudget as mb
from membudget import compat


class Scaled(nn.Module):
    """A layer whose scale is a keyword, a tensor that may require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor, shift: float = 0.0) -> Tensor:
        return (self.linear(x) * scale + shift).tanh()


def step(module: nn.Module, **keywords: float) -> list[Tensor]:
    """Return loss and gradients of a step with a keyword tensor."""
    x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
    scale = torch.full((4,), 2.0, requires_grad=True)
    loss = module(x, scale=scale, **keywords).square().sum()
    loss.backward()
    tensors = [x, scale, *module.parameters()]
    return [loss, *(t.grad for t in tensors if t.grad is not None)]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("keywords", [{}, {"shift": 0.5}])
def test_row_b10_a_reentrant_wrapper_takes_keyword_tensors(keywords) -> None:
    wrapped = compat.checkpoint_wrapper(
        Scaled(), checkpoint_impl=compat.CheckpointImpl.REENTRANT
    )
    found = step(wrapped, **keywords)
    assert len(found) == 5
    assert equal(found, step(Scaled(), **keywords))


def test_row_b10_a_keyword_tensor_alone_makes_a_reentrant_region_train() -> None:
    def run(region) -> list[Tensor]:
        module, x = Scaled(), torch.ones(2, 4)
        scale = torch.full((4,), 2.0, requires_grad=True)
        region(module, x, scale=scale).sum().backward()
        return [p.grad for p in (scale, *module.parameters()) if p.grad is not None]

    reentrant = functools.partial(mb.checkpoint, use_reentrant=True)
    assert equal(run(reentrant), run(lambda f, *args, **kwargs: f(*args, **kwargs)))


def test_row_b10_a_keyword_that_the_function_writes_is_named() -> None:
    def write(x: Tensor, *, y: Tensor) -> Tensor:
        return x * y.add_(1)

    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    with pytest.raises(mb.ChangedSinceForwardError, match="argument 'y'"):
        mb.checkpoint(write, x, y=y, use_reentrant=True).sum().backward()


def test_row_b10_several_inputs_of_a_chain_are_refused_in_words() -> None:
    a = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match=r"membudget\.checkpoint_sequential"):
        compat.checkpoint_sequential(nn.Sequential(nn.Tanh()), 1, a, a)  # type: ignore[arg-type]
    y = mb.checkpoint_sequential([torch.add, torch.sin], 2, a, a)
    assert torch.equal(y, (a + a).sin())


def test_row_b10_torch_s_error_catches_what_a_region_raises() -> None:
    assert issubclass(compat.CheckpointError, torch_checkpointing.CheckpointError)
    x = torch.ones(2, requires_grad=True)
    weight = torch.ones(2)
    y = mb.checkpoint(lambda x: x.sin() * weight, x)
    weight.add_(1)
    with pytest.raises(torch_checkpointing.CheckpointError, match="weight"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("module", "missing"), [(torch_checkpointing, set()), (torch_wrapping, set())]
)
def test_row_b10_every_public_name_of_torch_s_modules_is_there(module, missing) -> None:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]
    assert len(names) > 5
    assert {name for name in names if name not in compat.__all__} == missing
    for name in names:
        assert getattr(compat, name) is not None


def test_row_b10_the_context_that_does_nothing_is_torch_s() -> None:
    assert compat.noop_context_fn is torch_checkpointing.noop_context_fn


def test_row_b10_checkpoint_function_applies_a_reentrant_region() -> None:
    gradients: list[Any] = []
    for function in (compat.CheckpointFunction, torch_checkpointing.CheckpointFunction):
        x = torch.ones(3, requires_grad=True)
        y = function.apply(lambda x: x.sin().exp(), True, x)
        y.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_row_b10_checkpoint_function_loses_no_gradient_in_silence() -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(mb.ReentrantLimitError, match="would get none"):
        compat.CheckpointFunction.apply(lambda x: x * weight, True, torch.ones(3))


@pytest.mark.parametrize("policy", [3, 1.5, None, object()])
def test_row_b10_a_policy_of_a_scalar_is_a_type_error(policy) -> None:
    with pytest.raises(TypeError, match="must be either a function or a list"):
        torch_checkpointing.create_selective_checkpoint_contexts(policy)
    with pytest.raises(TypeError, match="a function or a list") as caught:
        compat.create_selective_checkpoint_contexts(policy)
    assert isinstance(caught.value, mb.OptionError)


def test_row_b10_a_list_of_what_is_no_operator_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="to be an OpOverload"):
        torch_checkpointing.create_selective_checkpoint_contexts([torch.mm])
    with pytest.raises(ValueError, match="holds operators"):
        compat.create_selective_checkpoint_contexts([torch.mm])


def test_row_b10_a_wrapped_module_is_known_by_torch_s_class() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = torch_wrapping.checkpoint_wrapper(nn.Linear(2, 2))
    assert isinstance(wrapped, compat.CheckpointWrapper)
    assert isinstance(wrapped, compat.ActivationWrapper)
