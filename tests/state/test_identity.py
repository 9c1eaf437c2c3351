"""Versions and addresses of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from membudget.state.identity import (
    address_of,
    addresses_of,
    version_of,
    versions_of,
)


def tensors(kind: str) -> list[Tensor]:
    written, other = torch.ones(2), torch.ones(3)
    written.add_(1)
    with torch.inference_mode():
        unversioned = torch.ones(1)
    odd = {
        "strided": [],
        "inference": [unversioned],
        "sparse": [torch.eye(2).to_sparse()],
    }
    return [written, *odd[kind], other]


@pytest.mark.parametrize("kind", ["strided", "inference", "sparse"])
def test_versions_and_addresses_of_several_tensors_are_those_of_each(kind: str):
    several = tensors(kind)
    assert versions_of(several) == [version_of(tensor) for tensor in several]
    assert addresses_of(several) == [address_of(tensor) for tensor in several]
    assert versions_of(several)[0] == 1
    assert len(set(addresses_of(several))) == len(several)
