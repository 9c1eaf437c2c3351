"""Behaviours 85-87, 90, 91, 93: a policy says which operators' outputs are kept.

The contexts of `compat.create_selective_checkpoint_contexts` are used, whose meaning is
torch's. What is kept is counted in operators that do not run again.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.compat import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from tests.behaviours.steps import (
    Block,
    Counted,
    Region,
    differences,
    plain,
    region_with,
)
from tests.oracles import CountedOperators

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE

pytestmark = pytest.mark.filterwarnings("ignore:the policy of a selective region")


def keeping(policy: Any, **options: Any) -> Callable[[], Any]:
    """Return the `context_fn` of a policy."""
    return functools.partial(create_selective_checkpoint_contexts, policy, **options)


def keep_all(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return SAVE


def keep_none(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return RECOMPUTE


def enum_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    return SAVE if operator is aten.mm.default else RECOMPUTE


def preferring_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    if operator is aten.mm.default:
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


def bool_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return operator is aten.mm.default


def attention(x: Tensor) -> Tensor:
    """Two matrix products with something cheap around them."""
    weights = (x @ x.t()).sin().exp()
    return ((weights @ x).cos() * x).sin()


def leaf(n: int = 4) -> Tensor:
    return torch.linspace(-1.0, 1.0, n * n).reshape(n, n).requires_grad_()


def backward_operators(function: Callable[..., Any], region: Region) -> Counter[str]:
    """Count the operators of the backward of `function` under `region`."""
    x = leaf()
    loss = region(function, x).sum()
    with CountedOperators() as operators:
        loss.backward()
    return operators.counts


@pytest.mark.parametrize(
    "policy",
    [[aten.mm.default], enum_policy, preferring_policy, bool_policy],
    ids=["list", "enum", "preference", "bool"],
)
def test_b85_operators_that_are_kept_do_not_run_again(policy: Any) -> None:
    without = backward_operators(attention, plain)
    everything = backward_operators(attention, mb.checkpoint)
    kept = backward_operators(attention, region_with(context_fn=keeping(policy)))
    assert everything["mm"] == without["mm"] + 2
    assert kept["mm"] == without["mm"]
    assert kept["exp"] == everything["exp"] == without["exp"] + 1


@pytest.mark.parametrize(
    "policy",
    [[aten.mm.default], enum_policy, bool_policy, keep_none],
    ids=["list", "enum", "bool", "none"],
)
def test_b85_a_selective_region_equals_the_plain_run(policy: Any) -> None:
    def step(region: Region) -> Any:
        model = nn.ModuleList([Block(dropout=0.3) for _ in range(2)])
        y = x = torch.randn(2, 5, 8, requires_grad=True)
        for block in model:
            y = region(block, y)
        y.square().sum().backward()
        return model, x, y

    assert differences(step, region_with(context_fn=keeping(policy))) == []


def test_b86_keeping_nothing_is_a_plain_region() -> None:
    region = region_with(context_fn=keeping(keep_none))
    expected = backward_operators(attention, mb.checkpoint)
    assert backward_operators(attention, region) == expected


def test_b86_keeping_everything_recomputes_nothing() -> None:
    function = Counted(attention)
    region = region_with(context_fn=keeping(keep_all))
    found = backward_operators(function, region)
    # `t` is a view: it costs nothing, and may be made anew.
    expected = backward_operators(attention, plain)
    assert found - expected <= Counter({"t": 1})
    assert expected - found == Counter()


class Policy:
    """A policy that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.recomputing: list[bool] = []

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        self.asked.append((operator, args, kwargs, context.op_output))
        self.recomputing.append(context.is_recompute)
        return operator is aten.mm.default


def test_b87_a_policy_sees_operator_arguments_and_output() -> None:
    policy, x = Policy(), leaf()
    mb.checkpoint(
        lambda x: (x @ x).sum(1, keepdim=True).exp(), x, context_fn=keeping(policy)
    )
    product, total, exponential = policy.asked
    assert [asked[0] for asked in policy.asked] == [
        aten.mm.default,
        aten.sum.dim_IntList,
        aten.exp.default,
    ]
    assert all(torch.equal(operand, x) for operand in product[1])
    assert torch.equal(product[3], x @ x)
    assert total[1][1:] == ([1], True)
    assert torch.equal(exponential[3], (x @ x).sum(1, keepdim=True).exp())


def test_b87_a_policy_is_asked_in_the_forward_only() -> None:
    policy = Policy()
    y = mb.checkpoint(attention, leaf(), context_fn=keeping(policy))
    asked = len(policy.asked)
    y.sum().backward()
    assert asked == len(policy.asked)
    assert policy.recomputing == [False] * asked


def test_b87_a_policy_may_have_state() -> None:
    class EverySecond:
        def __init__(self) -> None:
            self.products = 0

        def __call__(self, context: Any, operator: Any, *args: Any, **k: Any) -> bool:
            if operator is not aten.mm.default:
                return False
            self.products += 1
            return self.products % 2 == 0

    without = backward_operators(attention, plain)
    region = region_with(context_fn=lambda: keeping(EverySecond())())
    assert backward_operators(attention, region)["mm"] == without["mm"] + 1


def several_outputs(x: Tensor) -> Tensor:
    values, places = x.exp().topk(2)
    largest = x.sin().max(0)
    return values.sin() * places + largest.values.exp().sum() + largest.indices.sum()


def number_outputs(x: Tensor) -> Tensor:
    scale = x.detach().abs().max().item()
    return (x.exp() * scale).sin() if bool(x.detach().sum() < 9) else x.cos()


def view_outputs(x: Tensor) -> Tensor:
    first, *rest = x.exp().t().unbind(0)
    upper, lower = (x @ x).view(2, -1).split(1)
    return (first * sum(rest)).sin() + (upper * lower).exp().reshape(-1)[:4]


def random_outputs(x: Tensor) -> Tensor:
    mask = torch.rand(4, 4) > 0.5
    return torch.where(mask, x.exp(), x.sin() * torch.randn(4)).cos()


def normalised(x: Tensor) -> Tensor:
    return F.layer_norm(x.exp(), (4,)).sin() + F.log_softmax(x.sin(), 0).exp()


@pytest.mark.parametrize("policy", [keep_all, keep_none, bool_policy])
@pytest.mark.parametrize(
    "function",
    [several_outputs, number_outputs, view_outputs, random_outputs, normalised],
)
def test_b90_outputs_of_every_kind_are_kept(
    function: Callable[[Tensor], Tensor], policy: Any
) -> None:
    def step(region: Region) -> Any:
        x = leaf()
        y = region(function, x)
        y.sum().backward()
        return x, y

    assert differences(step, region_with(context_fn=keeping(policy))) == []


class Wrapped(Tensor):
    """A tensor subclass without a `__torch_dispatch__` of its own."""


@pytest.mark.parametrize("policy", [keep_all, keep_none, bool_policy])
def test_b90_a_tensor_subclass_may_be_kept(policy: Any) -> None:
    x = leaf().detach().as_subclass(Wrapped).requires_grad_()
    y = mb.checkpoint(attention, x, context_fn=keeping(policy))
    assert type(y) is Wrapped
    y.sum().backward()
    (expected,) = torch.autograd.grad(attention(x).sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("policy", [keep_all, bool_policy])
def test_b91_a_kept_tensor_that_changed_is_refused_or_right(policy: Any) -> None:
    def mutating(x: Tensor) -> Tensor:
        return (x @ x).mul_(2.0).sin()

    x = leaf()
    (expected,) = torch.autograd.grad(mutating(x).sum(), x)
    loss = mb.checkpoint(mutating, x, context_fn=keeping(policy)).sum()
    with contextlib.suppress(RuntimeError):
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


def test_b91_the_refusal_can_be_switched_off() -> None:
    def rectified(x: Tensor) -> Tensor:
        return (x @ x).relu_().sin()  # Twice is once: the change is harmless.

    x = leaf()
    (expected,) = torch.autograd.grad(rectified(x).sum(), x)
    allowing = keeping(bool_policy, allow_cache_entry_mutation=True)
    mb.checkpoint(rectified, x, context_fn=allowing).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


# torch 2.13 counts each operator apart: it misses an extra one of a kind that it knows.
# torch 2.13 runs the function again, and then does not know the operator.
@pytest.mark.parametrize("policy", [keep_all, keep_none, bool_policy])
def test_b93_a_function_that_would_run_other_operators_is_run_once(policy: Any) -> None:
    calls = Counted(lambda x: x)

    def growing(x: Tensor) -> Tensor:
        x = calls(x)
        return (x @ x).sin().exp() if calls.calls == 1 else x.cosh()

    x, y = leaf(), leaf()
    with torch.no_grad():
        y.copy_(x)
    mb.checkpoint(growing, x, context_fn=keeping(policy)).sum().backward()
    (y @ y).sin().exp().sum().backward()

    assert calls.calls == 1
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)
