"""The closed forms: they add up, and a traced step keeps what they say, to the byte."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paper_gpt import LAYER_TERMS, Layer
from torch import Tensor, nn
from torch.nn import functional as F

import membudget as mb
from membudget.memory.formulas import (
    LayerTerms,
    Recompute,
    TransformerShape,
    extra_terms,
    flash_layer_terms,
    layer_bytes,
    layer_terms,
    model_bytes,
)

GPT3 = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)


@st.composite
def shapes(draw) -> TransformerShape:
    ranks = draw(st.integers(1, 8))
    heads = ranks * draw(st.integers(1, 4))
    return TransformerShape(
        batch=draw(st.integers(1, 4)),
        sequence=ranks * draw(st.integers(1, 64)),
        hidden=heads * draw(st.integers(1, 16)),
        heads=heads,
        tensor_parallel=ranks,
        sequence_parallel=draw(st.booleans()),
    )


def alone(shape: TransformerShape) -> TransformerShape:
    return dataclasses.replace(shape, tensor_parallel=1, sequence_parallel=False)


# The forms themselves.


@given(shapes())
def test_terms_of_a_layer_add_up_to_equation_1(shape: TransformerShape):
    s, b, h, a = shape.sequence, shape.batch, shape.hidden, shape.heads
    terms = layer_terms(alone(shape))
    assert terms.total == 34 * s * b * h + 5 * a * s * s * b
    assert terms.attention == 11 * s * b * h + 5 * a * s * s * b
    assert terms.mlp == 19 * s * b * h
    assert terms.norm_inputs == 4 * s * b * h
    assert terms.core == 5 * a * s * s * b


@given(shapes())
def test_terms_of_a_rank_add_up_to_equations_2_and_4(shape: TransformerShape):
    t, sbh = shape.tensor_parallel, shape.sbh
    square = 5 * shape.heads * shape.sequence**2 * shape.batch
    # Times t, so that the paper's fractions are whole.
    expected = 34 * sbh if shape.sequence_parallel else (10 * t + 24) * sbh
    assert t * layer_terms(shape).total == expected + square
    assert t * layer_bytes(shape, "selective") == expected
    assert layer_bytes(shape, "full") == 2 * sbh


@given(shapes())
def test_flash_attention_saves_one_number_per_row_of_the_scores(
    shape: TransformerShape,
):
    flash, plain = flash_layer_terms(shape), layer_terms(shape)
    assert flash.core == flash.log_sum_exp
    assert flash.total - flash.core == plain.total - plain.core
    rows = shape.batch * shape.heads * shape.sequence
    assert shape.tensor_parallel * flash.core == 4 * rows


@given(shapes(), st.integers(1, 100), st.integers(1, 1000))
def test_a_model_is_its_layers_and_what_lies_outside(shape, layers: int, words: int):
    t, sbh = shape.tensor_parallel, shape.sbh
    logits = 4 * shape.sequence * shape.batch * words
    extra = extra_terms(shape, words * t)
    whole = 5 * sbh // t if shape.sequence_parallel else 5 * sbh
    assert sum(extra.values()) == whole + logits
    assert list(extra) == [
        *("embedding_dropout_mask", "norm_input", "output_input", "logits"),
    ]
    for way in ("none", "selective", "full"):
        of_layers = layers * layer_bytes(shape, way)
        assert model_bytes(shape, layers, words * t, way) == of_layers + whole + logits


def test_selective_recomputation_saves_70_percent_of_gpt3s_layers():
    whole, rest = layer_bytes(GPT3), layer_bytes(GPT3, "selective")
    assert (whole, rest) == (114 * GPT3.sbh, 34 * GPT3.sbh)
    assert round(100 * (1 - rest / whole)) == 70


def test_ranks_need_not_divide_tokens_that_they_do_not_share():
    shape = TransformerShape(1, 3, 8, 4, tensor_parallel=2)
    assert layer_terms(shape).norm_inputs == 4 * shape.sbh


def test_sizes_that_no_model_has_are_rejected():
    shape = TransformerShape(1, 8, 8, 4, tensor_parallel=4)
    with pytest.raises(mb.OptionError, match="recompute must be one of none, sel"):
        layer_bytes(shape, "some")  # type: ignore[arg-type]
    with pytest.raises(mb.OptionError, match="divide vocabulary, and 10 over 4"):
        extra_terms(shape, 10)
    with pytest.raises(mb.OptionError, match="vocabulary must be a positive integer"):
        model_bytes(shape, 1, 0)
    with pytest.raises(mb.OptionError, match="layers must be a positive integer"):
        model_bytes(shape, 0, 8)


# The traced step must agree.


class FlashCore(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)


def plain_layer(shape: TransformerShape) -> Layer:
    return Layer(shape.hidden, shape.heads)


def flash_layer(shape: TransformerShape) -> Layer:
    return Layer(shape.hidden, shape.heads, FlashCore(), flat=False)


SHAPES = [
    TransformerShape(batch=1, sequence=8, hidden=16, heads=2),
    TransformerShape(batch=2, sequence=16, hidden=24, heads=3),
    TransformerShape(batch=3, sequence=5, hidden=32, heads=4),
    TransformerShape(batch=2, sequence=64, hidden=16, heads=8),
]


def traced(
    shape: TransformerShape,
    make: Callable[[TransformerShape], Layer] = plain_layer,
    fake: bool = True,
) -> mb.StepGraph:
    """Profile a step of one layer."""
    with torch.device("meta" if fake else "cpu"):
        layer = make(shape).half()
        size = (shape.batch, shape.sequence, shape.hidden)
        x = torch.zeros(size, dtype=torch.half, requires_grad=True)
    return mb.profile(layer, x, fake=fake).graph


def kept(graph: mb.StepGraph) -> dict[int, str]:
    """Return the storages that autograd keeps, each with the first module to do so."""
    found: dict[int, str] = {}
    for record in graph.saved:
        storage = graph.values[record.value].storage
        if graph.storages[storage].kind in ("activation", "input"):
            found.setdefault(storage, record.module_path)
    return found


def maker(graph: mb.StepGraph, storage: int) -> str | None:
    """Return the module that made a storage; `None` if it was there before."""
    birth = graph.storages[storage].birth
    return None if birth < 0 else graph.operators[birth].module_path


def is_statistic(graph: mb.StepGraph, storage: int) -> bool:
    """Return whether a storage holds the means or deviations of a norm."""
    made = next(v for v in graph.values if v.storage == storage)
    return made.shape[-1] == 1


def found_terms(graph: mb.StepGraph) -> Counter[str]:
    terms: Counter[str] = Counter()
    for storage, path in kept(graph).items():
        name = LAYER_TERMS.get(path, path)
        if is_statistic(graph, storage):
            name = "statistics"
        if path == "core.values" and maker(graph, storage) == "core.dropout":
            name = "softmax_dropout_output"
        terms[name] += graph.storages[storage].bytes
    return terms


def expected_terms(terms: LayerTerms, shape: TransformerShape) -> dict[str, int]:
    named = {name: size for name, size in dataclasses.asdict(terms).items() if size}
    # Not in the paper: two norms, a mean and a deviation of two bytes for each token.
    return {**named, "statistics": 2 * 2 * 2 * shape.batch * shape.sequence}


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_traced_layer_saves_each_term_to_the_byte(shape, fake: bool):
    found = found_terms(traced(shape, fake=fake))
    assert found == expected_terms(layer_terms(shape), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize(
    ("way", "is_inside"),
    [
        ("none", lambda path: False),
        ("selective", lambda path: path.startswith("core")),
        ("full", lambda path: True),
    ],
)
def test_a_region_keeps_inputs_that_it_did_not_make(
    shape: TransformerShape, way: Recompute, is_inside
):
    graph = traced(shape)
    found = 0
    for storage, saver in kept(graph).items():
        made_by = maker(graph, storage)
        is_dropped = made_by is not None and is_inside(made_by) and is_inside(saver)
        if not is_dropped and not is_statistic(graph, storage):
            found += graph.storages[storage].bytes
    assert found == layer_bytes(shape, way)


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_a_traced_layer_with_fused_attention_saves_each_term(shape, fake: bool):
    found = found_terms(traced(shape, flash_layer, fake))
    expected = expected_terms(flash_layer_terms(shape), shape)
    parts = ("query_and_key", "value", "log_sum_exp", "projection_input")
    # One operator keeps q, k, v, its output and the logarithms, the output first.
    expected["core"] = sum(expected.pop(name) for name in parts)
    assert found == expected


def test_consecutive_layers_save_the_same():
    shape = SHAPES[1]
    with torch.device("meta"):
        layers = [plain_layer(shape) for _ in range(3)]
        model = nn.Sequential(*layers).half()
        size = (shape.batch, shape.sequence, shape.hidden)
        x = torch.zeros(size, dtype=torch.half)
    graph = mb.profile(model, x, fake=True).graph
    totals: Counter[str] = Counter()
    for storage, path in kept(graph).items():
        if not is_statistic(graph, storage):
            totals[path.partition(".")[0]] += graph.storages[storage].bytes
    assert totals == dict.fromkeys("012", layer_bytes(shape))
