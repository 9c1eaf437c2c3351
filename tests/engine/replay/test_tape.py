"""Aliases that autograd or the user makes where nobody observes it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb


def test_a_detached_view_of_another_dtype_is_recomputed_and_not_kept():
    storages = []

    def function(z: Tensor) -> Tensor:
        doubled = z * 2
        view = torch.view_as_real(doubled)
        storages.append(StorageWeakRef(doubled.untyped_storage()))
        # No `as_strided` of complex numbers gives this alias of real ones.
        return view.detach().sin() * view

    z = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    output = mb.checkpoint(function, z, engine="replay", verify=False)
    assert storages[0].expired()
    (found,) = torch.autograd.grad(output.sum(), z)
    (expected,) = torch.autograd.grad(function(z).sum(), z)
    assert torch.equal(found, expected)
