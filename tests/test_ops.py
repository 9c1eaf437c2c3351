"""What the recorder knows of operators: read from schemas, and listed by name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from membudget import ops
from membudget.ops import (
    facts_of,
    flat_outputs,
    tensors_in,
    tensors_in_tree,
)

aten = torch.ops.aten

# Their operators exist once these are imported.
REGISTERING = {
    "inductor": "torch._inductor.inductor_prims",
    "fsdp": "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "rngprims": "torch._prims.rng_prims",
    "_dtensor": "torch.distributed.tensor",
}


# Not in this torch; the table may lose it.
UNKNOWN = {"aten::rename_"}


def listed_names() -> set[str]:
    """Return every operator and namespace that a table of the module names."""
    tables = [t for t in vars(ops).values() if isinstance(t, frozenset)]
    names = {name for table in tables for name in table if isinstance(name, str)}
    return names.union(ops._STATISTICS) - UNKNOWN


@pytest.mark.parametrize("name", sorted(n for n in listed_names() if "::" not in n))
def test_every_namespace_that_is_listed_is_one_of_torch_s(name: str):
    if module := REGISTERING.get(name):
        importlib.import_module(module)
    schemas = torch._C._jit_get_all_schemas()
    assert name in {schema.name.partition("::")[0] for schema in schemas}


@pytest.mark.parametrize("name", sorted(n for n in listed_names() if "::" in n))
def test_every_operator_that_is_listed_is_one_of_torch_s(name: str):
    namespace, _, operator = name.partition("::")
    if module := REGISTERING.get(namespace):
        importlib.import_module(module)
    assert getattr(getattr(torch.ops, namespace), operator).overloads()


FLAGS = (
    *("is_view", "is_random", "is_empty", "is_opaque", "is_query", "is_numbered"),
    *("is_routing", "is_plain_view", "is_in_place", "is_simple", "returns_fresh"),
    "has_tensor_keywords",
)
PLAIN = {"is_numbered", "is_simple", "returns_fresh"}
CASES: dict[Any, set[str]] = {
    aten.sin.default: PLAIN,
    aten.addmm.default: PLAIN,
    aten.convolution.default: PLAIN,
    aten.max.dim: PLAIN,
    aten.topk.default: {*PLAIN, "is_routing"},
    aten.sort.default: {*PLAIN, "is_routing"},
    aten.t.default: {"is_numbered", "is_view", "is_plain_view"},
    aten.detach.default: {"is_view", "is_plain_view"},
    aten.split.Tensor: {"is_numbered", "is_view", "is_plain_view"},
    aten.sin_.default: {"is_numbered", "is_in_place"},
    aten.add_.Tensor: {"is_numbered", "is_in_place"},
    aten.transpose_.default: {"is_numbered", "is_opaque"},
    aten.set_.source_Tensor: {"is_numbered", "is_opaque"},
    aten.resize_.default: {"is_numbered", "is_opaque"},
    aten.native_dropout.default: {"is_numbered", "is_random", "returns_fresh"},
    aten.bernoulli_.float: {"is_numbered", "is_random", "is_in_place"},
    aten.empty_like.default: {"is_numbered", "is_empty", "returns_fresh"},
    aten.cat.default: {"is_numbered", "returns_fresh"},
    aten._foreach_add_.Scalar: {"is_numbered"},
    aten.sin.out: {"is_numbered", "has_tensor_keywords"},
    aten.histogram.bin_ct: {"is_numbered", "has_tensor_keywords", "returns_fresh"},
    aten.native_batch_norm.default: {"is_numbered", "returns_fresh"},
    torch.ops.prim.device.default: {"is_numbered", "is_query", "returns_fresh"},
}


@pytest.mark.parametrize("operator", CASES, ids=str)
def test_an_operator_is_what_its_schema_and_the_tables_say(operator: Any):
    facts = facts_of(operator)
    assert facts is not None
    found = {flag for flag in FLAGS if getattr(facts, flag)}
    if operator is torch.ops.prim.device.default:
        found.discard("is_simple")
    assert found == CASES[operator]


@pytest.mark.parametrize(
    ("operator", "tensors", "lists", "written", "names"),
    [
        (aten.addmm.default, (0, 1, 2), (), (), ()),
        (aten.convolution.default, (0, 1, 2), (), (), ()),
        (aten.index.Tensor, (0,), (1,), (), ()),
        (aten.cat.default, (), (0,), (), ()),
        (aten.add_.Tensor, (0, 1), (), (0,), ()),
        (aten._foreach_add_.List, (), (0, 1), (0,), ()),
        (aten.sin.out, (0,), (), (), ("out",)),
        (aten.rrelu_with_noise.default, (0, 1), (), (1,), ()),
    ],
    ids=str,
)
def test_the_places_of_tensors_are_read_from_the_schema(
    operator, tensors, lists, written, names
):
    facts = facts_of(operator)
    assert facts is not None
    assert (facts.tensors, facts.lists) == (tensors, lists)
    assert (facts.written, facts.written_names) == (written, names)


@pytest.mark.parametrize("training", [True, False])
def test_statistics_are_written_in_training_alone(training):
    x, mean = torch.zeros(2, 3), torch.zeros(3)
    facts = facts_of(aten.native_batch_norm.default)
    assert facts is not None
    assert facts.statistics is not None
    args = (x, None, None, mean, mean, training, 0.1, 1e-5)
    assert facts.statistics(args) is training
    assert not facts.statistics(args[:5])
    always = facts_of(aten._batch_norm_with_update.default)
    assert always is not None
    assert always.statistics is not None
    assert always.statistics((x, None, None, mean, mean, 0.1, 1e-5))
    plain = facts_of(aten.sin.default)
    assert plain is not None
    assert plain.statistics is None


def test_a_variant_without_statistics_writes_none():
    facts = facts_of(aten._native_batch_norm_legit.no_stats)
    assert facts is not None
    assert facts.statistics is not None
    x = torch.zeros(2, 3)
    assert not facts.statistics((x, None, None, True, 0.1, 1e-5))


def test_a_higher_order_operator_has_no_facts():
    assert facts_of(torch.ops.higher_order.cond) is None
    assert facts_of(aten.sin.default) is facts_of(aten.sin.default)


def test_outputs_and_arguments_are_flattened_in_order():
    a, b, c = torch.zeros(3).unbind()
    assert flat_outputs(a) == [a]
    assert flat_outputs([]) == []
    nested = flat_outputs((1, [2, (3, None)], 4))
    assert nested == [1, 2, 3, None, 4]
    found = list(tensors_in([a, 1, [b, None, (c,)], "text", {"not": a}]))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]


def test_a_copy_on_the_host_of_what_lies_elsewhere_decides():
    here, there = torch.ones(2), torch.ones(2, device="meta")

    assert ops.leaves_device([there], here)
    assert not ops.leaves_device([here], here)
    assert not ops.leaves_device([here], there)
    assert not ops.leaves_device([there], there)


def test_tensors_are_found_in_a_tree_of_any_containers():
    a, b, c = torch.ones(3).unbind()
    assert list(map(id, tensors_in_tree((a, {"b": [b, 2]}, "x", (c,))))) == [
        *map(id, (a, b, c))
    ]
