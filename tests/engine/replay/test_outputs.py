"""Every tensor among the outputs of an operator is known, whatever stands before it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb
from tests.devices import settle


def test_an_output_behind_one_that_is_none_is_dropped_and_made_again():
    storages: list[StorageWeakRef] = []

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.conv1d(x, w).sin()
        # convolution_backward returns None for the input, then the weight's gradient.
        (slope,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        storages.append(StorageWeakRef(slope.untyped_storage()))
        return slope.exp() * slope

    x = torch.randn(1, 2, 5)
    w = torch.randn(2, 2, 3, requires_grad=True)
    (plain,) = torch.autograd.grad(function(x, w).sum(), w)
    loss = mb.checkpoint(function, x, w, engine="replay").sum()

    settle()
    assert storages[-1].expired()
    assert torch.equal(torch.autograd.grad(loss, w)[0], plain)
