"""Sizes that no layer has are refused."""

from __future__ import annotations

import pytest

import membudget as mb
from membudget.memory.formulas import TransformerShape


@pytest.mark.parametrize("name", ["batch", "sequence", "hidden", "heads"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_sizes_that_are_not_positive_integers_are_rejected(name: str, size):
    sizes = {"batch": 2, "sequence": 2, "hidden": 2, "heads": 2, name: size}
    with pytest.raises(mb.OptionError, match=f"{name} must be a positive integer; got"):
        TransformerShape(**sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden": 10}, "heads must divide hidden, and 10 over 4 leaves 2"),
        ({"tensor_parallel": 3}, "tensor_parallel must divide heads, and 4 over 3"),
        ({"tensor_parallel": 0}, "tensor_parallel must be a positive integer"),
        (
            {"tensor_parallel": 4, "sequence": 6, "sequence_parallel": True},
            "tensor_parallel must divide sequence, and 6 over 4 leaves 2",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_rejected(sizes: dict, said: str):
    with pytest.raises(mb.OptionError, match=said):
        TransformerShape(
            **{"batch": 1, "sequence": 8, "hidden": 8, "heads": 4, **sizes}
        )
