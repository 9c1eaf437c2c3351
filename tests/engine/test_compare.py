"""Is the recomputed tensor the saved one, by its metadata; and what an error says."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from membudget.engine.compare import (
    describe,
    metadata,
    mismatch_error,
    same_metadata,
)

X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (X, torch.ones(2, 3), True),
        (X, torch.zeros(3, 2), False),
        (X, X.double(), False),
        (X, X.to("meta"), False),
        (X, torch.zeros(3, 2).t(), False),
        (torch.zeros(2, 1), torch.zeros(2, 5)[:, :1], False),
        (torch.zeros(1, 3), torch.zeros(2, 3)[:1], True),
        # The stride of one element, or of none, places nothing.
        (torch.zeros(1, 3), torch.zeros(1, 3).as_strided((1, 3), (7, 1)), True),
        (torch.zeros(1, 3), torch.zeros(1, 9).as_strided((1, 3), (7, 2)), False),
        (torch.zeros(0, 3), torch.zeros(3, 0).t(), True),
        (torch.zeros(2, 3, 0), torch.empty(0).as_strided((2, 3, 0), (9, 9, 9)), True),
        (torch.zeros(()), torch.ones(()), True),
    ],
)
def test_two_tensors_are_alike_if_kernels_cannot_tell_them_apart(one, other, same):
    saved, made = metadata(one), metadata(other)
    assert (saved == made or same_metadata(saved, made)) is same


@pytest.fixture(scope="module")
def compressed() -> Tensor:
    """Return a sparse tensor of the kind that has no stride."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        return torch.eye(3).to_sparse_csr()


def test_a_compressed_tensor_has_metadata_without_a_stride(compressed):
    shape, dtype, device, stride = metadata(compressed)
    assert (tuple(shape), dtype) == ((3, 3), torch.float32)
    assert (device.type, stride) == ("cpu", None)
    assert metadata(compressed.clone()) == metadata(compressed)
    assert not same_metadata(metadata(compressed), metadata(torch.eye(3)))
    assert not same_metadata(metadata(torch.eye(3)), metadata(compressed))
    assert describe(metadata(compressed)) == "float32[3, 3] on cpu, no stride"


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (X.t(), "float32[3, 2] on cpu, stride (1, 3)"),
        (torch.zeros((), dtype=torch.int64), "int64[] on cpu, stride ()"),
    ],
)
def test_metadata_reads_as_a_person_writes_it(tensor: Tensor, text: str):
    assert describe(metadata(tensor)) == text


@dataclass
class Site:
    module_path: str = "layers.1"
    operator: str = "torch.Tensor.exp"
    line: str = "model.py:7 in forward"


def error(index: int | None, site: Any, traces: str = "") -> Any:
    return mismatch_error(index, site, "two", "three", ["a cache", "a flag"], traces)


def test_an_error_names_the_tensor_the_place_and_the_causes():
    found = error(4, Site())
    assert str(found).splitlines() == [
        "the recompute of a region did not repeat its forward: saved tensor 4 differs.",
        "  saved in the forward: two",
        "  made by the recompute: three",
        "  where: module 'layers.1', torch.Tensor.exp at model.py:7 in forward",
        "  likely cause: a cache",
        "  likely cause: a flag",
        "  To see the operators of both runs, give the region debug=True or use "
        "set_checkpoint_debug_enabled(True).",
    ]
    assert (found.index, found.saved, found.recomputed) == (4, "two", "three")
    assert list(found.causes) == ["a cache", "a flag"]
    assert found.module_path == "layers.1"
    assert found.operator == "torch.Tensor.exp"
    assert found.line == "model.py:7 in forward"


def test_an_error_about_the_number_of_tensors_names_no_place():
    found = error(None, None)
    assert "the number of tensors differs" in str(found)
    assert "where:" not in str(found)
    assert found.index is None
    assert found.module_path == found.operator == found.line == ""


def test_an_error_outside_of_modules_names_the_operator_alone():
    assert "  where: torch.Tensor.exp at " in str(error(0, Site(module_path="")))


def test_traces_stand_in_the_place_of_the_advice_to_make_them():
    text = str(error(0, Site(), traces="both traces"))
    assert text.endswith("both traces")
    assert "debug=True" not in text
