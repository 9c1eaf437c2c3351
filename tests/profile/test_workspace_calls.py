"""Which recorded calls are tried on zeros, and what others are taken to need."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from membudget.profile.lifetimes import _stored_bytes
from membudget.profile.recorded_call import RecordedCall, TensorSpec
from membudget.profile.workspace import (
    _copy_bytes,
    _extents,
    _is_product,
    _is_small,
    _may_need_more,
    note_workspaces,
)

ATEN = torch.ops.aten


def spec(*shape: int, stride: Any = None, dtype: Any = torch.float32) -> TensorSpec:
    given = torch.empty(shape, device="meta").stride() if stride is None else stride
    return TensorSpec(shape, tuple(given), dtype)


def call(operator: Any, *args: Any) -> RecordedCall:
    return RecordedCall(operator, args, {}, [0])


ROWS, GAPS = spec(4, 4), spec(4, 4, stride=(8, 2))
HALF = spec(4, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("made", "may"),
    [
        # BLAS reads rows and columns, and copies all else; oneDNN repacks bfloat16.
        (call(ATEN.mm.default, ROWS, ROWS), False),
        (call(ATEN.mm.default, ROWS, spec(4, 4, stride=(1, 4))), False),
        (call(ATEN.mm.default, ROWS, GAPS), True),
        (call(ATEN.addmm.default, spec(4), HALF, HALF), True),
        (call(ATEN.bmm.default, spec(2, 4, 4), spec(2, 4, 4)), False),
        (call(ATEN.baddbmm.default, GAPS, ROWS, ROWS), True),
        # An elementwise operator converts operands to one layout and dtype.
        (call(ATEN.add.Tensor, ROWS, ROWS), False),
        (call(ATEN.add.Tensor, ROWS, GAPS), True),
        (call(ATEN.add.Tensor, ROWS, HALF), True),
        (call(ATEN.add.Tensor, HALF, HALF), False),
        # All else may need anything.
        (call(ATEN.convolution.default, ROWS, ROWS), True),
        (call(ATEN.sort.default, ROWS), True),
        (call(ATEN.embedding.default, ROWS, spec(9, dtype=torch.int64)), False),
        (call(ATEN.embedding.default, GAPS, spec(9, dtype=torch.int64)), True),
        # Views need nothing, and other operators are not tried.
        (call(ATEN.view.default, ROWS, [16]), False),
        (call(ATEN.sort.default, TensorSpec((4,), (), torch.float32)), False),
        (call(torch.ops.prims.sin.default, GAPS), False),
        (call(torch.ops.higher_order.cond, GAPS), False),
    ],
)
def test_only_calls_that_may_allocate_more_than_their_outputs_are_tried(made, may):
    assert _may_need_more(made) is may


def test_products_are_told_by_their_names():
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        assert _is_product(call(getattr(ATEN, name).default))
    for operator in (ATEN.mv.default, ATEN.mul.Tensor, ATEN.dot.default):
        assert not _is_product(call(operator))


def recorded(
    sizes: list[int], inputs: list[int], outputs: list[int], flops: int = 0
) -> Any:
    """Return a recorder of one operator, which reads and writes some values."""
    operator = SimpleNamespace(inputs=inputs, outputs=outputs, flops=flops)
    values = [SimpleNamespace(bytes=s, storage=i) for i, s in enumerate(sizes)]
    lifetimes = SimpleNamespace(values=values)
    return SimpleNamespace(operators=[operator], lifetimes=lifetimes)


@pytest.mark.parametrize(
    ("inputs", "outputs", "flops", "is_small"),
    [
        ([0], [1], 0, True),
        # 128 MiB, counted once for each tensor.
        ([0, 1], [1, 0], 0, True),
        ([0, 1], [2], 0, False),
        ([0], [1], 1 << 31, True),
        ([0], [1], (1 << 31) + 1, False),
    ],
)
def test_calls_of_up_to_128_mib_and_two_thousand_million_operations_are_tried(
    inputs, outputs, flops, is_small
):
    half = 1 << 26
    recorder = recorded([half, half, 1], inputs, outputs, flops)
    read = call(ATEN.sort.default, *(spec(half, dtype=torch.int8) for _ in inputs))
    assert _is_small(recorder, read) is is_small


def test_what_shares_memory_in_the_step_shares_it_in_the_trial():
    """The parts of a projection to queries, keys and values, say."""
    recorder = recorded([8, 8, 8], [0, 1, 2], [])
    for value in recorder.lifetimes.values:
        value.storage = 5
    parts = [replace(spec(4, 8, stride=(24, 1)), offset=8 * i) for i in range(3)]
    assert _extents(recorder, call(ATEN.stack.default, parts)) == {5: (0, 4 * 96)}
    far = [replace(part, offset=part.offset + 100) for part in parts]
    # From a multiple of 64 bytes on.
    assert _extents(recorder, call(ATEN.stack.default, far)) == {5: (384, 400 + 384)}


def test_the_copy_of_an_operand_is_as_large_as_its_matrix():
    assert _copy_bytes(GAPS) == 4 * 4 * 4
    assert _copy_bytes(spec(2, 3, 5, dtype=torch.bfloat16)) == 2 * 3 * 5 * 2
    assert _copy_bytes(spec(5, stride=(2,))) == 0


def storage(size: int, birth: int, kind: str = "activation", **grown: int) -> Any:
    table = {int(name[2:]): more for name, more in grown.items()}
    return SimpleNamespace(bytes=size, birth=birth, kind=kind, grown=table)


def test_a_workspace_is_what_was_allocated_beyond_the_outputs():
    operators = [SimpleNamespace(workspace_bytes=-1) for _ in range(4)]
    storages = [
        storage(100, 0),
        storage(30, 0),
        # It was made with 10 bytes, and has grown to 60 by two operators.
        storage(60, 1, at2=20, at3=30),
        storage(500, 2, kind="outside"),
        storage(700, -1),
    ]
    recorder: Any = SimpleNamespace(
        operators=operators, lifetimes=SimpleNamespace(storages=storages)
    )
    note_workspaces(recorder, {0: 135, 1: 17, 2: 25, 3: 29})
    assert [o.workspace_bytes for o in operators] == [5, 7, 5, 0]
    note_workspaces(recorder, {3: 31})
    assert [o.workspace_bytes for o in operators] == [5, 7, 5, 1]


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.ones(3, 5), 60),
        (torch.ones(3, 5, dtype=torch.int8), 15),
        (torch.ones(3, 1).expand(3, 5), 12),
        (torch.ones(()).expand(3, 5), 4),
        (torch.ones(0, 1).expand(0, 5), 0),
        (torch.ones(3, 5)[:, ::2], 36),
    ],
)
def test_an_expanded_dimension_is_stored_once(tensor, size):
    assert _stored_bytes(tensor) == size
