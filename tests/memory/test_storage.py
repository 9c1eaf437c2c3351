"""Bytes by storage."""

from __future__ import annotations

import torch

import membudget as mb


def test_views_share_one_storage():
    x = torch.zeros(10, 10)
    assert mb.storage_bytes([x, x.t(), x[3:], x.view(-1)]) == 400


def test_storages_of_meta_tensors_are_told_apart():
    tensors = [torch.empty(10, device="meta"), torch.empty(20, device="meta")]
    assert mb.storage_bytes(tensors) == 120


def test_an_expanded_tensor_costs_its_one_element():
    assert mb.storage_bytes([torch.zeros(1).expand(1000)]) == 4


def test_sparse_tensors_count_indices_and_values():
    coo = torch.eye(3).to_sparse()
    assert mb.storage_bytes([coo]) == 2 * 3 * 8 + 3 * 4


def test_nothing_costs_nothing():
    assert mb.storage_bytes([]) == 0
