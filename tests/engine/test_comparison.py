"""Is a recomputed tensor the saved one: its metadata, and its bytes."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from membudget import ChangedSinceForwardError
from membudget.engine.comparison import (
    Fingerprints,
    Watch,
    describe,
    metadata,
    same_metadata,
)
from membudget.state.bits import fingerprint
from membudget.state.identity import address_of

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


def prints_of(saving: list[Tensor], x: Tensor) -> list[tuple[int, int]]:
    """Return the fingerprints of what RReLU saves, and after it a sine."""
    prints = Fingerprints()

    def pack(tensor: Tensor) -> Tensor:
        prints.add(tensor)
        saving.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.rrelu(x, training=True).sin()
    prints.settle()
    return prints.taken


def test_an_operator_that_fills_what_it_saved_is_waited_for() -> None:
    saved: list[Tensor] = []

    taken = prints_of(saved, torch.linspace(-2, 2, 100, requires_grad=True))

    assert taken == [fingerprint(tensor) for tensor in saved]
    assert len(taken) == 3


def test_a_vector_of_bytes_is_not_compared() -> None:
    prints = Fingerprints()
    prints.add(torch.zeros(3, dtype=torch.uint8))
    prints.add(torch.ones(3, dtype=torch.uint8))
    prints.settle()

    assert prints.taken[0] == prints.taken[1]


def test_the_tensors_of_an_operator_wait_until_another_one_saves() -> None:
    prints = Fingerprints()
    counts: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        prints.add(tensor)
        counts.append(len(prints.taken))
        return tensor

    x, y = (torch.linspace(0, 1, 3, requires_grad=True) for _ in range(2))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        (x * y).sin().exp()
    # Both factors of the product are saved by one operator.
    assert counts == [0, 0, 2, 3]
    prints.settle()
    assert len(prints.taken) == 4
    prints.settle()
    assert len(prints.taken) == 4


def watched(tensors: dict[str, Tensor]) -> Watch:
    """Return what watches the given tensors as the region's own."""
    return Watch({}, {address_of(tensor): name for name, tensor in tensors.items()})


def test_an_operator_that_changes_two_tensors_leaves_both_as_they_were() -> None:
    a, b = torch.zeros(3), torch.ones(3)

    with (
        pytest.raises(ChangedSinceForwardError, match="a is changed in place by the"),
        watched({"a": a, "b": b}),
    ):
        torch._foreach_add_([a, b], 1)

    assert a.tolist() == [0, 0, 0]
    assert b.tolist() == [1, 1, 1]
    assert (a._version, b._version) == (0, 0)


def test_an_operator_that_writes_two_views_of_a_tensor_is_judged_by_both() -> None:
    a = torch.zeros(4)

    with (
        pytest.raises(ChangedSinceForwardError, match="a is changed in place"),
        watched({"a": a}),
    ):
        torch._foreach_add_([a[:2], a[2:]], [1.0, 0.0])

    assert a.tolist() == [0, 0, 0, 0]


def test_what_a_write_left_unchanged_can_be_read() -> None:
    a = torch.tensor([float("nan"), -0.0])

    with watched({"a": a}):
        a.mul_(1)
        a.mul_(1)
        assert torch.isnan(a + 1)[0]

    assert a._version == 0


def test_a_write_that_changes_the_sign_of_a_zero_is_refused() -> None:
    a = torch.tensor([0.0])

    with (
        pytest.raises(ChangedSinceForwardError, match="a is changed in place"),
        watched({"a": a}),
    ):
        a.neg_()

    assert math.copysign(1, a.item()) == 1


def test_a_tensor_of_the_region_that_is_read_before_it_is_written_is_refused() -> None:
    a, b = torch.zeros(3), torch.ones(3)

    with (
        pytest.raises(ChangedSinceForwardError, match="b is changed in place"),
        watched({"a": a, "b": b}),
    ):
        a.mul_(b)
