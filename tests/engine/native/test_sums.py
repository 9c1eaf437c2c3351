"""Fingerprints in C++ are those that torch's operators compute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from membudget.engine import native
from membudget.state import bits
from membudget.state.bits import Fingerprint, fingerprint
from tests.state.test_bits import LAYOUTS

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler")

DTYPES = (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def both_ways(tensor: Tensor) -> tuple[Fingerprint, Fingerprint]:
    """Return the fingerprint in C++, and that by torch's operators."""
    bits.accelerate(native.extension().sums)
    in_cpp = fingerprint(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "_SUMS", [])
        return in_cpp, fingerprint(tensor)


def test_zeros_that_have_no_memory_have_the_fingerprint_of_others() -> None:
    in_cpp, in_python = both_ways(torch._efficientzerotensor((3, 4)))

    assert in_cpp == in_python == fingerprint(torch.zeros(3, 4))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fingerprint_in_cpp_is_the_same_for_all_strides(name: str) -> None:
    in_cpp, in_python = both_ways(LAYOUTS[name])

    assert in_cpp == in_python


@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=64),
    st.sampled_from(DTYPES),
)
def test_a_fingerprint_in_cpp_is_the_same_for_all_bits(
    words: list[int], dtype: torch.dtype
) -> None:
    tensor = torch.tensor(words).repeat(4).view(dtype).view(2, -1)
    in_cpp, in_python = both_ways(tensor)
    turned_in_cpp, turned_in_python = both_ways(tensor.t())

    assert in_cpp == in_python
    assert turned_in_cpp == turned_in_python
