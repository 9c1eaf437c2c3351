"""Policies in torch's form, and what a region in compiled code hands to torch."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    noop_context_fn,
)
from torch.utils.checkpoint import (
    create_selective_checkpoint_contexts as torch_contexts,
)

import membudget as mb
from membudget import policies
from membudget.compat import create_selective_checkpoint_contexts
from membudget.engine import region, torch_form
from membudget.engine.candidate import Candidate
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.policy import Policy
from membudget.engine.region import run_region
from membudget.engine.torch_form import TorchPolicy, checkpoint_in_compiled_code
from membudget.engine.torch_form import policy_of as carried_by

aten = torch.ops.aten
OUTPUT = torch.ones(2)


def policy_of(given: Any) -> Any:
    """Return the policy that the contexts carry."""
    policy = carried_by(create_selective_checkpoint_contexts(given))
    assert policy is not None
    return policy


def candidate(operator: Any, *args: Any, **kwargs: Any) -> Candidate:
    return Candidate(operator, args, kwargs, OUTPUT, 1, 0, lambda: "")


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_a_list_keeps_the_overloads_it_names_and_all_of_a_packet(kind):
    policy = policy_of(kind([aten.mm, aten.sum.dim_IntList]))
    kept = {
        aten.mm.default: True,
        aten.mm.out: True,
        aten.sum.dim_IntList: True,
        aten.sum.default: False,
        aten.addmm.default: False,
    }
    assert {o: policy.keeps(candidate(o)) for o in kept} == kept
    assert {o: policy.by_operator(o) for o in kept} == kept
    assert policy.expects_to_keep


@pytest.mark.parametrize(
    ("decision", "kept"),
    [
        (CheckpointPolicy.MUST_SAVE, True),
        (CheckpointPolicy.PREFER_SAVE, True),
        (CheckpointPolicy.MUST_RECOMPUTE, False),
        (CheckpointPolicy.PREFER_RECOMPUTE, False),
        (True, True),
        (False, False),
    ],
)
def test_a_function_is_asked_with_the_operator_and_its_arguments(decision, kept):
    asked: list[Any] = []

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append((context.is_recompute, context.op_output, operator, args, kwargs))
        return decision

    policy = policy_of(decide)
    assert policy.keeps(candidate(aten.mm.default, 1, 2, key=3)) is kept
    assert asked == [(False, OUTPUT, aten.mm.default, (1, 2), {"key": 3})]
    assert policy.by_operator(aten.mm.default) is None
    assert policy.expects_to_keep


def test_what_is_no_policy_is_refused():
    with pytest.raises(
        mb.OptionError, match=r"a policy is a function or a list.*got 3"
    ):
        policy_of(3)
    with pytest.raises(
        mb.OptionError, match=r"a list policy holds operators.*got 'mm'"
    ):
        policy_of([aten.mm, "mm"])


def test_contexts_of_somebody_else_carry_no_policy():
    assert carried_by((nullcontext(), nullcontext())) is None
    theirs = torch_contexts([aten.mm.default])
    assert carried_by(theirs) is None


class Noting(Policy):
    """Keeps the second output of each operator, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Candidate] = []

    def keeps(self, candidate: Candidate) -> bool:
        self.asked.append(candidate)
        return candidate.output_index == 1


def context(*outputs: Any) -> SelectiveCheckpointContext:
    output = outputs if len(outputs) > 1 else outputs[0]
    return SelectiveCheckpointContext(is_recompute=False, op_output=output)


def test_torch_asks_the_policy_for_each_output_and_numbers_the_operators():
    policy = Noting()
    asked = TorchPolicy(policy)
    assert not asked(context(OUTPUT), aten.sin.default, 1, key=2)
    assert asked(context(OUTPUT, OUTPUT + 1), aten.max.dim, 3)
    found = [(c.index, c.output_index, c.operator) for c in policy.asked]
    assert found == [
        (1, 0, aten.sin.default),
        (2, 0, aten.max.dim),
        (2, 1, aten.max.dim),
    ]
    assert (policy.asked[0].args, policy.asked[0].kwargs) == ((1,), {"key": 2})
    assert policy.asked[0].module_path == ""


def test_views_are_not_kept_and_what_cannot_run_again_is():
    policy = Noting()
    asked = TorchPolicy(policy)
    assert asked(context(OUTPUT), aten.t.default) is False
    assert asked(context(OUTPUT), torch.ops.higher_order.cond) is True
    assert policy.asked == []
    asked(context(OUTPUT), aten.sin.default)
    # Operators that are not asked about count all the same.
    assert policy.asked[0].index == 3


@pytest.mark.parametrize(
    ("kept", "recomputed"),
    [([aten.sin], (1, 1)), ([aten.exp], (1, 0)), ([aten.cos], (2, 1))],
)
def test_a_region_recomputes_what_the_contexts_do_not_keep(kept, recomputed):
    ran: list[str] = []

    class Noted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ran.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    def function(x: Tensor) -> Tensor:
        return x.sin().exp().cos()

    x = torch.linspace(0, 1, 3, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    y = mb.checkpoint(function, x, context_fn=contexts, verify=False)
    with Noted():
        (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(found, expected)
    # The derivative of the cosine is one sine more.
    assert (ran.count("sin"), ran.count("exp")) == recomputed


# In compiled code.

X = torch.linspace(0, 1, 4).requires_grad_()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what torch's checkpoint is called with."""
    seen: list[tuple[Any, ...]] = []

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((function, args, kwargs))
        return "ran"

    monkeypatch.setattr(torch_form, "torch_checkpoint", run)
    return seen


def contexts() -> Any:
    return nullcontext(), nullcontext()


def test_options_stay_behind_and_the_function_s_keywords_go_along(handed):
    keywords = {"dim": 0, "early_stop": False, "debug": True, "engine": "rerun"}
    assert checkpoint_in_compiled_code(torch.sum, (X,), keywords) == "ran"
    assert handed == [(torch.sum, (X,), {"use_reentrant": False, "dim": 0})]


def test_a_decorator_takes_the_options_first(handed):
    decorated = checkpoint_in_compiled_code(None, (), {"context_fn": contexts})
    assert decorated(torch.sum)(X, dim=0) == "ran"
    assert handed == [
        (torch.sum, (X,), {"use_reentrant": False, "dim": 0, "context_fn": contexts})
    ]


def test_contexts_that_do_nothing_are_left_out(handed):
    checkpoint_in_compiled_code(torch.sin, (X,), {"context_fn": noop_context_fn})
    checkpoint_in_compiled_code(torch.sin, (X,), {"context_fn": None})
    assert [kwargs for *_, kwargs in handed] == [{"use_reentrant": False}] * 2


@pytest.fixture
def compiling(monkeypatch) -> None:
    monkeypatch.setattr(region, "is_compiling", lambda: True)


def test_options_that_were_checked_before_mean_the_same(handed, compiling):
    options = RegionOptions(context_fn=contexts, debug=True)
    assert run_region(torch.sum, (X,), {"dim": 0}, options, None) == "ran"
    assert handed == [
        (torch.sum, (X,), {"use_reentrant": False, "dim": 0, "context_fn": contexts})
    ]


def kept_by(handed: list[tuple[Any, ...]]) -> Any:
    """Return the policy that the contexts of the last call carry."""
    *_, kwargs = handed[-1]
    return carried_by(kwargs["context_fn"]())


def test_what_is_kept_reaches_torch_by_contexts(handed, compiling):
    checkpoint_in_compiled_code(torch.sin, (X,), {"keep": policies.matmuls})
    assert kept_by(handed) == policies.matmuls
    decorated = checkpoint_in_compiled_code(None, (), {"keep": policies.everything})
    decorated(torch.sin)(X)
    assert kept_by(handed) == policies.everything
    options = RegionOptions(keep=policies.nothing)
    run_region(torch.sin, (X,), {}, options, None)
    assert kept_by(handed) == policies.nothing


def test_globs_are_a_policy_like_any_other(handed):
    checkpoint_in_compiled_code(nn.Sequential(nn.Linear(4, 4)), (X,), {"keep": ["0"]})
    assert kept_by(handed) is not None


def number_of(handed: list[tuple[Any, ...]]) -> int:
    """Return the number that stands for the policy of the last call."""
    *_, kwargs = handed[-1]
    number: int = kwargs["context_fn"].args[0]
    return number


def test_a_policy_that_is_traced_again_is_stored_once(handed, compiling):
    model = nn.Sequential(nn.Linear(4, 4))
    stored = []
    for keep in (["0"], policies.matmuls, ["0"], policies.matmuls):
        checkpoint_in_compiled_code(model, (X,), {"keep": keep})
        stored.append((number_of(handed), len(torch_form._KEPT)))
    first, second, *again = stored
    assert again == [(first[0], second[1]), second]
    assert torch_form._KEPT[second[0]][0] == policies.matmuls


def test_names_of_tensors_are_refused_in_a_warning(handed):
    with pytest.warns(UserWarning, match="membudget.name does nothing inside"):
        checkpoint_in_compiled_code(torch.sin, (X,), {"keep": policies.named("out")})


def test_modules_are_known_by_their_names_below_the_region_s(handed, compiling):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def names() -> dict[str, str]:
        return torch_form._KEPT[number_of(handed)][1]

    options = RegionOptions(keep=policies.matmuls)
    run_region(model, (X,), {}, options, Statistics("h.3"))
    assert names()[str(id(model[0]))] == "h.3.0"
    run_region(model.forward, (X,), {}, options, None)
    assert names()[str(id(model[0]))] == "0"
    run_region(lambda x: model(x), (X,), {}, options, None)
    assert names() == {}


@pytest.mark.parametrize("keep", [None, policies.matmuls, ["*"]])
def test_outside_of_a_compiler_the_gradients_are_the_plain_ones(keep):
    def function(x: Tensor) -> Tensor:
        return (x.sin() @ x).exp()

    y = checkpoint_in_compiled_code(function, (X,), {"keep": keep})
    (found,) = torch.autograd.grad(y, X)
    (expected,) = torch.autograd.grad(function(X), X)
    assert torch.equal(found, expected)


def test_an_unhashable_policy_that_is_no_list_is_refused():
    class Unmade:
        def __hash__(self) -> int:
            raise AttributeError

    with pytest.raises(
        mb.OptionError, match=r"made inside a function that torch\.comp"
    ):
        checkpoint_in_compiled_code(torch.sin, (X,), {"keep": Unmade()})
