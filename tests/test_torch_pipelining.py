"""Each private name of torch's pipelining is there, and does what it must.

If a test fails after an upgrade of torch, the name in it has gone or changed;
`_torch_pipelining` and `_torch_stage` say what it was for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from membudget import _torch_pipelining as private
from membudget._torch_stage import BufferlessStage

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.cpu_only("torch's schedules and gloo")


def test_every_action_has_a_type_of_torch_but_recompute() -> None:
    for name, type_ in private.TYPES.items():
        is_own = isinstance(type_, private.OwnType)
        assert is_own == (name == "recompute")


@pytest.mark.parametrize("name", private.OF_TORCH)
def test_torch_says_in_which_order_stages_compute(name: str) -> None:
    made = private.computations(name, 2, 2, 4)
    for rank, actions in made.items():
        forwards = [a for a in actions if a[0] == "forward"]
        assert len(forwards) == 2 * 4
        places = private.rank_of_stages(name, 2, 4)
        assert {places[stage] for _, stage, _ in actions} == {rank}


def test_a_receive_stands_where_its_sender_has_sent() -> None:
    computed = {
        0: [("forward", 0, 0), ("backward", 0, 0)],
        1: [("forward", 1, 0), ("backward", 1, 0)],
    }
    first, second = private.with_transfers(computed, {0: 0, 1: 1}, 1)
    assert [a for a in first if "shard" not in a[0]] == [
        ("forward", 0, 0),
        ("send_forward", 0, 0),
        ("receive_backward", 0, 0),
        ("backward", 0, 0),
        ("reduce_gradients", 0, -1),
    ]
    assert [a for a in second if "shard" not in a[0]] == [
        ("receive_forward", 1, 0),
        ("forward", 1, 0),
        ("backward", 1, 0),
        ("send_backward", 1, 0),
        ("reduce_gradients", 1, -1),
    ]


def test_buffers_have_the_strides_of_what_is_received() -> None:
    from torch.distributed.pipelining._utils import extract_tensor_meta

    x = torch.zeros(2, 3, 4).transpose(0, 2)
    buffer = private.buffer_like(extract_tensor_meta(x), torch.device("cpu"))
    assert (buffer.shape, buffer.stride()) == (x.shape, x.stride())


def test_the_overridden_methods_are_those_of_torch() -> None:
    of_torch = BufferlessStage.__mro__[1:]
    for name in (
        *("_setup_forward_recv_info", "_create_grad_recv_info"),
        *("_retrieve_recv_activations", "_retrieve_recv_grads"),
        *("_prepare_backward_infra", "set_local_bwd_input"),
        *("get_fwd_recv_ops", "get_bwd_recv_ops"),
    ):
        assert any(name in vars(kind) for kind in of_torch), name


def test_a_torch_that_lacks_a_name_is_refused_in_words() -> None:
    code = (
        "from torch.distributed.pipelining import schedules\n"
        "del schedules._add_send_recv\n"
        "import membudget.pipeline"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert "drives the pipelining engine of torch 2.13" in found.stderr
    assert "_add_send_recv" in found.stderr
