"""Bytes by storage."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import membudget as mb


def test_views_share_one_storage():
    x = torch.zeros(10, 10)
    assert mb.storage_bytes([x, x.t(), x[3:], x.view(-1)]) == 400


def test_storages_of_meta_tensors_are_distinct():
    tensors = [torch.empty(10, device="meta"), torch.empty(20, device="meta")]
    assert mb.storage_bytes(tensors) == 120


def test_an_expanded_tensor_counts_one_element():
    assert mb.storage_bytes([torch.zeros(1).expand(1000)]) == 4


no_sparse = pytest.mark.cpu_only("emu has no sparse tensors")


@no_sparse
def test_sparse_tensors_count_indices_and_values():
    coo = torch.eye(3).to_sparse()
    assert mb.storage_bytes([coo]) == 2 * 3 * 8 + 3 * 4


@no_sparse
@pytest.mark.filterwarnings("ignore:Sparse [CB]S[CR] tensor support:UserWarning")
@pytest.mark.parametrize(
    ("make", "values"),
    [
        (torch.sparse_csr_tensor, torch.ones(3)),
        (torch.sparse_csc_tensor, torch.ones(3)),
        (torch.sparse_bsr_tensor, torch.ones(3, 2, 2)),
        (torch.sparse_bsc_tensor, torch.ones(3, 2, 2)),
    ],
    ids=["csr", "csc", "bsr", "bsc"],
)
def test_compressed_tensors_count_both_kinds_of_indices_and_the_values(make, values):
    pointers, indices = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 1])
    compressed = make(pointers, indices, values, check_invariants=True)
    found = mb.storage_bytes([compressed])
    assert found == pointers.nbytes + indices.nbytes + values.nbytes


def test_a_wrapper_tensor_counts_the_tensors_inside():
    x = torch.zeros(10)
    made = TwoTensor(x, x + 1)
    assert mb.storage_bytes([made]) == 80
    assert mb.storage_bytes([made, made.a]) == 80
    nested = TwoTensor(made, TwoTensor(x + 2, x + 3))
    assert mb.storage_bytes([nested]) == 160


def test_nothing_costs_nothing():
    assert mb.storage_bytes([]) == 0
