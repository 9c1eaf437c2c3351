"""The policy that keeps what a plan names, by hand."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.engine.candidate import Answer, Candidate
from membudget.engine.stages import Stages
from membudget.errors import PlanError
from membudget.policies import Planned

SIN: Any = torch.ops.aten.sin.default
COS: Any = torch.ops.aten.cos.default
FREXP: Any = torch.ops.aten.frexp.Tensor


def asks(policy: Planned, *calls: tuple[int, int, Any]) -> list[Answer]:
    """Return the answers of one call of a region."""
    output = torch.zeros(1)
    call = policy.begin()
    answers = [
        call.keeps(Candidate(operator, (), {}, output, number, position, lambda: ""))
        for number, position, operator in calls
    ]
    call.end(max((number for number, _, _ in calls), default=0))
    return answers


def test_the_outputs_that_are_named_are_kept_and_no_others():
    policy = Planned({(2, 0): "aten.sin.default", (3, 1): "aten.frexp.Tensor"})
    found = asks(policy, (1, 0, COS), (2, 0, SIN), (3, 0, FREXP), (3, 1, FREXP))
    assert found == [False, True, False, True]
    assert policy.differences == 0


def test_what_the_plan_offloads_is_held_by_what_it_says():
    names = {(1, 0): "aten.sin.default", (2, 0): "aten.cos.default"}
    off = mb.offload("1MiB")
    policy = Planned(names, offloaded={(2, 0): off})
    assert asks(policy, (1, 0, SIN), (2, 0, COS), (3, 0, SIN)) == [True, off, False]
    # In place, and by another kernel of the same kind.
    in_place: Any = torch.ops.aten.cos_.default
    assert asks(policy, (1, 0, SIN), (2, 1, in_place)) == [True, off]
    assert pickle.loads(pickle.dumps(policy)).differences == 0


def test_what_is_named_is_kept_where_it_is_written_in_place_and_the_other_way():
    """On fake tensors torch runs `sin` at times where a real step runs `sin_`."""
    in_place: Any = torch.ops.aten.sin_.default
    fresh = Planned({(1, 0): "aten.sin.default"})
    assert asks(fresh, (1, 1, in_place)) == [True]
    written = Planned({(1, 1): "aten.sin_.default"})
    assert asks(written, (1, 0, SIN)) == [True]
    assert fresh.differences == written.differences == 0


def test_after_another_operator_nothing_is_kept_in_that_call():
    policy = Planned({(1, 0): "aten.sin.default", (2, 0): "aten.cos.default"})
    assert asks(policy, (1, 0, COS), (2, 0, COS)) == [False, False]
    assert policy.differences == 1


def test_the_next_call_is_looked_at_anew():
    policy = Planned({(1, 0): "aten.sin.default", (2, 0): "aten.cos.default"})
    asks(policy, (1, 0, COS), (2, 0, COS))
    assert asks(policy, (1, 0, SIN), (2, 0, COS)) == [True, True]
    assert policy.differences == 1


def test_each_call_that_differs_counts_once():
    policy = Planned({(1, 0): "aten.sin.default", (2, 0): "aten.sin.default"})
    for _ in range(3):
        asks(policy, (1, 0, COS), (2, 0, COS))
    assert policy.differences == 3


def test_a_call_of_one_operator_is_looked_at_anew():
    policy = Planned({(1, 0): "aten.sin.default"})
    assert asks(policy, (1, 0, COS)) == [False]
    assert asks(policy, (1, 0, SIN)) == [True]


def test_a_call_that_begins_later_than_the_last_one_ended_is_looked_at_anew():
    policy = Planned({(1, 0): "aten.sin.default", (3, 0): "aten.sin.default"})
    assert asks(policy, (1, 0, COS)) == [False]
    assert asks(policy, (3, 0, SIN)) == [True]


def test_a_call_that_ends_before_what_is_named_counts_as_a_difference():
    policy = Planned({(1, 0): "aten.sin.default", (5, 0): "aten.sin.default"})
    asks(policy, (1, 0, SIN))
    asks(policy, (1, 0, SIN), (5, 0, SIN))
    assert policy.differences == 1


def test_a_policy_that_is_pickled_keeps_the_same():
    policy = Planned({(1, 0): "aten.sin.default"})
    assert asks(pickle.loads(pickle.dumps(policy)), (1, 0, SIN)) == [True]


def test_an_empty_plan_keeps_nothing_and_never_differs():
    policy = Planned({})
    assert asks(policy, (1, 0, SIN), (2, 0, COS)) == [False, False]
    assert policy.differences == 0


def test_outside_of_a_call_only_the_output_itself_is_compared():
    policy = Planned({(2, 0): "aten.sin.default"})
    output = torch.zeros(1)

    def keeps(operator: Any, number: int, position: int) -> Answer:
        return policy.keeps(
            Candidate(operator, (), {}, output, number, position, lambda: "")
        )

    assert keeps(SIN, 2, 0)
    assert not keeps(COS, 2, 0)
    assert not keeps(SIN, 2, 2)
    assert not keeps(SIN, 1, 0)
    assert policy.differences == 0


FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
EFFICIENT: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default


def test_attention_is_kept_whole_whichever_kernel_serves():
    policy = Planned({(1, 0): FLASH, (2, 0): "aten.sin.default"})
    of_attention = [(1, output, EFFICIENT) for output in range(4)]
    assert asks(policy, *of_attention, (2, 0, SIN)) == [True] * 5
    assert policy.differences == 0


def test_a_plan_for_another_device_is_refused_at_an_operator_that_differs():
    policy = Planned({(1, 0): "aten.sin.default"}, made_for="cuda", operators=1)
    assert asks(policy, (1, 0, SIN)) == [True]
    with pytest.raises(PlanError, match=r"made for cuda, .* 1 .* aten\.cos"):
        asks(policy, (1, 0, COS))
    with pytest.raises(PlanError, match=r"is aten\.sin\.default; here it is absent"):
        asks(policy)


def test_a_plan_for_another_device_is_refused_where_a_region_runs_more():
    policy = Planned({(1, 0): "aten.sin.default"}, made_for="cuda", operators=2)
    assert asks(policy, (1, 0, SIN), (2, 0, COS)) == [True, False]
    with pytest.raises(PlanError, match="a region runs 2 operators; here it runs 3"):
        asks(policy, (1, 0, SIN), (2, 0, COS), (3, 0, SIN))
    here = Planned({(1, 0): "aten.sin.default"}, operators=2)
    assert asks(here, (1, 0, SIN), (2, 0, COS), (3, 0, SIN)) == [True, False, False]
    assert here.differences == 0


def test_stages_of_another_device_are_refused_where_a_kernel_may_save_more():
    stages = Stages([(0, 0), (1, 0)], [frozenset(), frozenset()])
    policy = Planned({(1, 0): "aten.sin.default"}, stages, "cuda", operators=2)
    assert asks(policy, (1, 0, SIN), (2, 0, COS)) == [True, False]
    with pytest.raises(
        PlanError, match=r"efficient_attention\.default may save others"
    ):
        asks(policy, (1, 0, SIN), (2, 0, EFFICIENT))
