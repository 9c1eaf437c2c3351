"""Policy functions that are made anew in each call are one policy."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import membudget as mb
from membudget import compat
from membudget.engine.policy_key import policy_key
from membudget.engine.replay.verified import VERIFIED
from tests.oracles import CountedOperators

MM = torch.ops.aten.mm.default


def counting(every: int, wanted: Any = frozenset((MM,))) -> Callable[..., Any]:
    """Return a policy as torch's documentation makes one in each forward."""
    counts: dict[str, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        counts[str(operator)] += 1
        is_kept = operator in wanted and counts[str(operator)] % every == 0
        return (
            CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return policy


class Own:
    """An object whose value nobody can tell."""


def over(content: Any) -> Callable[[Any], Any]:
    return lambda candidate: content


def test_functions_of_equal_code_and_contents_have_one_key():
    assert policy_key(counting(2)) == policy_key(counting(2))
    assert policy_key(counting(2)) != policy_key(counting(3))
    assert policy_key(counting(2)) != policy_key(counting(2, {MM}))
    part = functools.partial(over, 3)
    assert policy_key(part) == policy_key(functools.partial(over, 3))
    assert policy_key(part) != policy_key(functools.partial(over, 4))


def test_defaults_count_as_contents():
    def made(number: int) -> Callable[..., Any]:
        return lambda candidate, least=number: candidate.output.numel() > least

    assert policy_key(made(1)) == policy_key(made(1))
    assert policy_key(made(1)) != policy_key(made(2))


@pytest.mark.parametrize("content", [Own(), torch.ones(2), [[[[[[[1]]]]]]], object])
def test_a_function_over_something_else_is_itself_alone(content):
    one, other = over(content), over(content)
    assert policy_key(one) == policy_key(one)
    assert (policy_key(one) == policy_key(other)) is (content is object)


def test_objects_and_methods_are_themselves():
    class Chooses:
        def __call__(self, candidate: Any) -> bool:
            return False

        def keeps(self, candidate: Any) -> bool:
            return False

    chooses = Chooses()
    assert policy_key(chooses) == policy_key(chooses) != policy_key(Chooses())
    assert policy_key(chooses.keeps) == policy_key(chooses.keeps)
    assert policy_key(chooses.keeps) != policy_key(Chooses().keeps)


def test_a_variable_without_a_value_cannot_be_described():
    def made() -> Callable[..., Any]:
        def policy(candidate: Any) -> Any:
            return later

        assert isinstance(policy_key(policy), weakref.ref)
        later = True
        return policy

    assert made()(None)


def test_a_module_counts_as_itself_and_is_not_held():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    key = policy_key(over(model))
    assert key == policy_key(over(model))
    assert key != policy_key(over(other))
    reference = weakref.ref(model)
    del model
    assert reference() is None


def test_what_a_function_counts_leaves_its_key_as_it_is():
    policy = counting(2)
    before = policy_key(policy)
    policy(None, MM)
    assert policy_key(policy) == before == policy_key(counting(2))


def block(x: Tensor) -> Tensor:
    return ((x @ x).sin() @ x).sin()


def steps(region: Callable[[Tensor], Tensor]) -> int:
    """Return how many signatures several calls add."""
    before = len(VERIFIED)
    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(5):
        region(x).sum().backward()
    return len(VERIFIED) - before


def test_policies_of_each_call_are_verified_once():
    contexts = compat.create_selective_checkpoint_contexts

    def torch_way(x: Tensor) -> Any:
        return mb.checkpoint(block, x, context_fn=lambda: contexts(counting(2)))

    def predicate(x: Tensor) -> Any:
        least = 3
        return mb.checkpoint(block, x, keep=lambda c: c.output.numel() > least)

    assert steps(torch_way) == 1
    assert steps(predicate) == 1


def test_policies_of_each_call_keep_what_the_first_one_kept():
    contexts = compat.create_selective_checkpoint_contexts
    x = torch.randn(4, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    for _ in range(5):
        y: Any = mb.checkpoint(block, x, context_fn=lambda: contexts(counting(2)))
        with CountedOperators() as counter:
            (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, plain)
        assert counter.counts["mm"] == 4 + 1  # The first product runs again.


class Holder:
    """Chooses by a tensor that it holds."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def keeps(self, candidate: mb.policies.Candidate) -> bool:
        return candidate.output.numel() < self.mask.numel()


@pytest.mark.parametrize(
    "made",
    [
        lambda mask: lambda c, m=mask: c.output.numel() < m.numel(),
        lambda mask: lambda c: c.output.numel() < mask.numel(),
        lambda mask: Holder(mask).keeps,
        lambda mask: functools.partial(Holder.keeps, Holder(mask)),
    ],
    ids=["default", "closure", "method", "partial"],
)
def test_what_a_policy_of_one_call_holds_is_freed_after_it(made):
    mask = torch.ones(64)
    reference = weakref.ref(mask)
    x = torch.randn(4, 4, requires_grad=True)
    y: Any = mb.checkpoint(block, x, keep=made(mask))
    y.sum().backward()
    del mask, y
    gc.collect()
    assert reference() is None
