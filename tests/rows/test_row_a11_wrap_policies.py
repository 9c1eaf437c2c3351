"""Row A11: a policy selects the modules that it selects with torch's function."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import (
    checkpoint_wrapper as torch_wrapping,
)
from torch.distributed.fsdp import wrap as policies

from membudget import compat
from membudget.attach import carried_by, has_region


class Tied(nn.Module):
    """Two names for one layer, and a list below a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first
        self.parts = nn.ModuleDict(
            {
                "a": nn.ModuleList([nn.Linear(8, 8), nn.Tanh()]),
                "b": nn.Bilinear(8, 8, 8),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh())
        layers: Any = self.parts["a"]
        for layer in layers:
            x = layer(x)
        return self.parts["b"](x, x)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )


MODELS = [perceptron, transformer, Tied, convolutional]


def by_size(elements: int) -> Callable[..., bool]:
    return functools.partial(
        policies.size_based_auto_wrap_policy, min_num_params=elements
    )


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


POLICIES = {
    **{f"size {n}": by_size(n) for n in (0, 1, 64, 100, 300, 600, 1000)},
    "size, no leaves": functools.partial(
        policies.size_based_auto_wrap_policy,
        min_num_params=100,
        force_leaf_modules={nn.ModuleList},
        exclude_wrap_modules={nn.Linear},
    ),
    "always": policies.always_wrap_policy,
    "lambda": functools.partial(policies.lambda_auto_wrap_policy, lambda_fn=is_linear),
    "transformer": functools.partial(
        policies.transformer_auto_wrap_policy,
        transformer_layer_cls={nn.TransformerEncoderLayer, nn.Sequential},
    ),
    "either": functools.partial(
        policies._or_policy,
        policies=[
            by_size(300),
            functools.partial(policies.lambda_auto_wrap_policy, lambda_fn=is_linear),
        ],
    ),
    "classes": policies.ModuleWrapPolicy({nn.Linear, nn.Conv2d}),
    "custom": policies.CustomPolicy(is_linear),
    "own function": lambda module, recurse, nonwrapped_numel: (
        recurse or 50 < nonwrapped_numel < 400
    ),
    "own signature": lambda module, recurse, **_: recurse or is_linear(module),
}


def torch_selects(model: nn.Module, **selection: Any) -> set[str]:
    """Return the names of the modules that torch wraps, as they were before."""
    names = {id(m): name for name, m in model.named_modules()}
    torch_wrapping.apply_activation_checkpointing(model, **selection)
    return {
        names[id(module._checkpoint_wrapped_module)]
        for module in model.modules()
        if isinstance(module, torch_wrapping.CheckpointWrapper)
    }


def ours_selects(model: nn.Module, **selection: Any) -> set[str]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*selected no submodule")
        compat.apply_activation_checkpointing(model, **selection)
    return {name for name, m in model.named_modules() if has_region(m)}


def initialised(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    if make is convolutional:
        model(torch.ones(2, 3, 5, 5))
    return model


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("make", MODELS)
def test_row_a11_a_policy_selects_what_it_selects_with_torch(make, policy) -> None:
    expected = torch_selects(initialised(make), auto_wrap_policy=policy)
    assert ours_selects(initialised(make), auto_wrap_policy=policy) == expected


@pytest.mark.parametrize("make", MODELS)
def test_row_a11_a_check_function_selects_what_it_selects_with_torch(make) -> None:
    expected = torch_selects(initialised(make), check_fn=is_linear)
    assert expected
    assert ours_selects(initialised(make), check_fn=is_linear) == expected


def test_row_a11_a_size_selects_what_is_left_above_it() -> None:
    assert ours_selects(perceptron(), auto_wrap_policy=by_size(300)) == {"2.0"}
    assert ours_selects(perceptron(), auto_wrap_policy=by_size(100)) == {
        *("0", "2.0", "2.1"),
    }


def test_row_a11_keywords_of_a_custom_policy_are_options_of_its_regions() -> None:
    model: Any = perceptron()
    policy = policies.CustomPolicy(
        lambda module: {"engine": "replay"} if is_linear(module) else False
    )
    compat.apply_activation_checkpointing(model, auto_wrap_policy=policy)
    region: Any = carried_by(model[0])
    assert region.options.engine == "replay"
    assert not has_region(model[1])


def test_row_a11_regions_by_size_give_the_plain_gradients() -> None:
    gradients = []
    for put in (False, True):
        model = initialised(perceptron)
        if put:
            compat.apply_activation_checkpointing(model, auto_wrap_policy=by_size(300))
        x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
        model(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("selection", "asked"),
    [
        ({"auto_wrap_policy": by_size(10**8)}, "auto_wrap_policy"),
        (
            {"auto_wrap_policy": policies.CustomPolicy(lambda m: False)},
            "auto_wrap_policy",
        ),
        ({"check_fn": lambda m: False}, "check_fn"),
    ],
)
def test_row_a11_a_policy_that_selects_nothing_warns(selection, asked) -> None:
    with pytest.warns(UserWarning, match=f"no submodule of Sequential.*{asked}"):
        compat.apply_activation_checkpointing(perceptron(), **selection)


def test_row_a11_what_is_no_policy_is_refused_as_torch_does() -> None:
    with pytest.raises(ValueError, match="callable or be a pre-defined wrap policy"):
        compat.apply_activation_checkpointing(perceptron(), auto_wrap_policy=3)


def test_row_a11_another_wrapper_stands_where_torch_puts_it() -> None:
    model = perceptron()
    compat.apply_activation_checkpointing(
        model, torch_wrapping.offload_wrapper, auto_wrap_policy=by_size(300)
    )
    found = {
        n for n, m in model.named_modules() if isinstance(m, compat.OffloadWrapper)
    }
    assert found


def test_row_a11_torch_s_own_class_is_refused_twice_as_there() -> None:
    model = perceptron()
    wrap = functools.partial(
        compat.apply_activation_checkpointing,
        model,
        compat.CheckpointWrapper,
        is_linear,
    )
    wrap()
    with pytest.raises(AssertionError, match="already wrapped"):
        wrap()
