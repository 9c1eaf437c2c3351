"""Policies: what they keep, how they compose, that they pickle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import membudget as mb
from membudget.engine.candidate import Answer, Candidate
from membudget.engine.policy import Policy, as_policy
from tests.oracles import CountedOperators

aten = torch.ops.aten

OPERATORS = (aten.mm.default, aten.exp.default, aten.convolution.default)

READY = {
    name: getattr(mb.policies, name)
    for name in ("nothing", "everything", "matmuls", "convolutions", "attention")
}


def candidate(operator: Any = aten.mm.default, path: str = "", index: int = 1) -> Any:
    return Candidate(operator, (), {}, torch.ones(2), index, 0, lambda: path)


OFF = mb.offload("1MiB")

CHOSEN = [*READY.values(), mb.policies.inside("a.*"), mb.policies.operators("exp")]

MOVED = [mb.policies.offloaded(policy, OFF) for policy in CHOSEN]


def policies(chosen: list[Policy] = CHOSEN) -> st.SearchStrategy[Policy]:
    leaves = st.sampled_from(chosen)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=6,
    )


three_answers = policies([*CHOSEN, *MOVED])


@given(three_answers, st.sampled_from(OPERATORS), st.sampled_from(["", "a.b", "c"]))
def test_a_decision_by_the_operator_alone_is_the_decision(
    policy: Policy, operator: Any, path: str
) -> None:
    decided = policy.by_operator(operator)

    assert decided is None or decided == policy.keeps(candidate(operator, path))


@given(policies(), policies(), st.sampled_from(OPERATORS))
def test_policies_compose_like_sets(one: Policy, other: Policy, operator: Any) -> None:
    it = candidate(operator, "a.b")

    assert (one | other).keeps(it) == (one.keeps(it) or other.keeps(it))
    assert (one & other).keeps(it) == (one.keeps(it) and other.keeps(it))
    assert (~one).keeps(it) != one.keeps(it)


def on_device(answer: Answer) -> int:
    """Return how much of an output an answer leaves on the device."""
    return 2 if answer is True else int(answer is OFF)


@given(three_answers, three_answers, st.sampled_from(OPERATORS))
def test_or_leaves_more_on_the_device_and_and_leaves_less(
    one: Policy, other: Policy, operator: Any
) -> None:
    it = candidate(operator, "a.b")
    answers = on_device(one.keeps(it)), on_device(other.keeps(it))

    assert on_device((one | other).keeps(it)) == max(answers)
    assert on_device((one & other).keeps(it)) == min(answers)
    assert on_device((~one).keeps(it)) == (0 if answers[0] else 2)


def test_a_function_of_a_candidate_may_offload() -> None:
    def keep(it: Candidate) -> Any:
        return {1: OFF, 2: True}.get(it.index)

    answers = [as_policy(keep).keeps(candidate(index=index)) for index in (1, 2, 3)]
    assert answers == [OFF, True, False]


def test_what_offloads_is_pickled_without_its_memory() -> None:
    policy = pickle.loads(pickle.dumps(MOVED[0] | READY["matmuls"]))
    assert policy.keeps(candidate()) is True
    assert copy.deepcopy(MOVED[1]).keeps(candidate()) is OFF


def listed_operators() -> list[str]:
    policies = [p for p in vars(mb.engine.policy).values() if hasattr(p, "names")]
    names = {n for p in policies if isinstance(p.names, frozenset) for n in p.names}
    return sorted(names)


@pytest.mark.parametrize("name", listed_operators())
def test_every_operator_that_a_policy_lists_is_one_of_torch_s(name: str) -> None:
    assert getattr(aten, name).overloads()


NAMED = {name: mb.policies.named(name) for name in ("a", "b")}


@pytest.mark.parametrize("asked", ["a", "b", "c"])
def test_names_compose_like_sets(asked: str) -> None:
    a, b = (policy.keeps_name(asked) for policy in NAMED.values())
    one, other = NAMED.values()

    assert (a, b) == (asked == "a", asked == "b")
    moved = mb.policies.offloaded(one, OFF)
    assert moved.keeps_name(asked) is (OFF if a else False)
    assert (moved | one).keeps_name(asked) is a
    assert (moved & one).keeps_name(asked) is moved.keeps_name(asked)
    assert (one | other).keeps_name(asked) == (a or b)
    assert (one & other).keeps_name(asked) == (a and b)
    assert (one & one).keeps_name(asked) == a
    assert (~one).keeps_name(asked) == (not a)


@given(policies())
def test_a_policy_pickles(policy: Policy) -> None:
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("path", "kept"),
    [("a.attn", True), ("a.attn.proj", True), ("a.mlp", False), ("", False)],
)
def test_what_runs_inside_a_submodule_is_kept(path: str, kept: bool) -> None:
    assert as_policy(["*.attn"]).keeps(candidate(path=path)) == kept


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(mb.OptionError, match="keep must be a policy"):
        as_policy(3)
    with pytest.raises(mb.OptionError, match="keep needs the replay engine"):
        mb.checkpoint(torch.sin, torch.ones(1), engine="rerun", keep=READY["matmuls"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        y: Tensor = self.second(x)
        return mb.name(y.exp(), "out").tanh()


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.ran.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def replayed(keep: Any) -> list[str]:
    """Return which operators of the forward run in the backward."""
    x = torch.randn(3, 4, requires_grad=True)
    y = mb.checkpoint(Block(), x, engine="replay", keep=keep, verify=False)
    with Operators() as operators:
        y.sum().backward()
    return [name for name in operators.ran if name in ("addmm", "gelu", "sin", "exp")]


def test_a_submodule_that_is_kept_is_not_run_again() -> None:
    assert replayed(None) == ["addmm", "sin", "addmm", "gelu", "addmm", "exp"]
    assert replayed(["second"]) == ["exp", "addmm", "sin"]
    assert replayed("second.*") == ["exp", "addmm", "sin"]


def test_a_named_tensor_is_kept() -> None:
    assert "exp" not in replayed(mb.policies.named("out"))
    assert replayed(mb.policies.matmuls) == ["exp", "gelu", "sin"]
    assert replayed(mb.policies.everything) == []


@pytest.mark.parametrize("is_by_operator", [True, False])
def test_an_answer_that_is_false_in_some_other_way_keeps_nothing(is_by_operator):
    class Answers(Policy):
        reads_arguments = False

        def keeps(self, candidate: Candidate) -> Any:
            return 0

        def by_operator(self, operator: Any) -> Any:
            return 0 if is_by_operator else None

    x = torch.ones(3, requires_grad=True)
    region = mb.checkpoint(engine="replay", verify=False, keep=Answers())
    y = region(lambda x: (x * 2).sin().exp().tanh())(x)
    with CountedOperators() as operators:
        y.sum().backward()
    assert operators.counts["sin"] == 1
