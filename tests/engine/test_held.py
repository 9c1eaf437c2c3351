"""What a region holds of its arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from membudget.engine.held import stride_of, with_stride

LAYOUTS = {
    "contiguous": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    "expanded": lambda: torch.arange(4.0).expand(2, 3, 4),
    "expanded inside": lambda: torch.arange(8.0).view(2, 1, 4).expand(2, 3, 4),
    "every second": lambda: torch.arange(48.0).reshape(2, 3, 8)[..., ::2],
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(
        memory_format=torch.channels_last
    ),
    "one number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_an_offloader_made_contiguous_is_laid_out_as_before(layout):
    tensor = LAYOUTS[layout]()
    found = with_stride(tensor.contiguous(), stride_of(tensor))
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_an_expanded_tensor_takes_the_memory_of_one():
    tensor = torch.arange(4.0).expand(1000, 4)
    found = with_stride(tensor.contiguous(), stride_of(tensor))
    assert found.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_tensor_has_no_stride_and_stays_as_it_is(make):
    tensor = make(torch.eye(3))
    assert stride_of(tensor) is None
    assert with_stride(tensor, None) is tensor
