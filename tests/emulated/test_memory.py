"""Memory is counted, limited, cached and poisoned as on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.emulated import emu

KIB, MIB = 1 << 10, 1 << 20


def stat(name: str) -> int:
    return int(torch.accelerator.memory_stats()[f"{name}.all.current"])


def peak(name: str) -> int:
    return int(torch.accelerator.memory_stats()[f"{name}.all.peak"])


def new(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="emu")


def test_requested_allocated_and_reserved_bytes_differ_as_cudas_do():
    before = {name: stat(f"{name}_bytes") for name in ("requested", "allocated")}
    x = new(1000)
    assert stat("requested_bytes") - before["requested"] == 1000
    assert stat("allocated_bytes") - before["allocated"] == 1024
    assert stat("reserved_bytes") == 2 * MIB
    del x
    assert stat("allocated_bytes") == before["allocated"]
    assert stat("reserved_bytes") == 2 * MIB
    torch.accelerator.empty_cache()
    assert stat("reserved_bytes") == 0


def test_a_view_takes_no_memory():
    x = new(1000)
    before = stat("requested_bytes")
    views = [x.view(10, 100), x[5:], x.view(torch.int32), x.unfold(0, 3, 2)]
    assert stat("requested_bytes") == before
    assert {v.untyped_storage().data_ptr() for v in views} == {x.data_ptr()}


def test_the_peak_is_what_was_live_at_once():
    torch.accelerator.reset_peak_memory_stats()
    x = new(3000)
    y = new(4000)
    del x, y
    z = new(5000)
    assert peak("requested_bytes") == 7000
    assert stat("requested_bytes") == z.numel()


@pytest.mark.parametrize(
    ("n_bytes", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_have_the_sizes_of_cudas_allocator(n_bytes: int, reserved: int):
    x = new(n_bytes)
    assert stat("reserved_bytes") == reserved
    del x


def test_segments_scale_for_small_models():
    emu.configure(segment_bytes=2 * KIB)
    x, y = new(512), new(100 * KIB)
    assert stat("reserved_bytes") == 2 * KIB + 100 * KIB
    del x, y


def test_one_block_in_use_keeps_its_segment_reserved():
    blocks = [new(512 * KIB) for _ in range(8)]
    assert stat("reserved_bytes") == 4 * MIB
    blocks = blocks[::4]
    torch.accelerator.empty_cache()
    assert stat("allocated_bytes") == 2 * 512 * KIB
    assert stat("reserved_bytes") == 4 * MIB
    big = new(MIB)  # Neither segment lends its free blocks to another stream.
    assert stat("reserved_bytes") == 4 * MIB
    with torch.Stream("emu"):
        other = new(MIB)
    assert stat("reserved_bytes") == 6 * MIB
    del big, other


def test_a_freed_block_is_reused_by_its_stream():
    x = new(1000)
    address = x.data_ptr()
    del x
    with torch.Stream("emu"):
        assert new(1000).data_ptr() != address
    assert new(1000).data_ptr() == address


def test_of_equal_free_blocks_that_of_the_oldest_segment_is_taken():
    blocks = [new(MIB) for _ in range(6)]
    addresses = [block.data_ptr() for block in blocks]
    del blocks[1], blocks[3]  # The second and the fifth.
    assert new(MIB).data_ptr() == addresses[1]
    torch.accelerator.empty_cache()


def test_a_limit_raises_and_what_was_freed_fits_again():
    emu.configure(limit_bytes=4 * MIB)
    taken = [new(MIB) for _ in range(4)]
    with pytest.raises(torch.OutOfMemoryError, match=r"emu out of memory\. Tried to"):
        new(2 * KIB)
    assert torch.accelerator.get_memory_info() == (0, 4 * MIB)
    del taken[0]
    assert new(MIB).numel() == MIB


def test_a_limit_gives_cached_segments_back_before_it_raises():
    emu.configure(limit_bytes=4 * MIB)
    retries = torch.accelerator.memory_stats()["num_alloc_retries"]
    small = [new(MIB) for _ in range(4)]
    assert stat("reserved_bytes") == 4 * MIB
    del small
    with torch.Stream("emu"):
        x = new(MIB)  # The blocks of the other stream are not its own.
    assert stat("reserved_bytes") == 2 * MIB
    assert torch.accelerator.memory_stats()["num_alloc_retries"] == retries + 1
    del x


@pytest.mark.parametrize("k", [1, 3])
def test_the_kth_allocation_fails_and_the_next_does_not(k: int):
    emu.configure(fail_at=k)
    x = [new(8) for _ in range(k - 1)]
    with pytest.raises(torch.OutOfMemoryError, match=f"as planned: allocation {k}, of"):
        new(8)
    assert new(8).numel() == 8
    assert len(x) == k - 1


def test_without_segments_what_is_reserved_is_what_tensors_take():
    emu.configure(segment_bytes=0, limit_bytes=10_000)
    x, y = new(1001), new(999)
    assert stat("reserved_bytes") == stat("requested_bytes") == 2000
    del x
    assert stat("reserved_bytes") == stat("allocated_bytes") == 999
    del y
    most = [new(5000), new(5000)]
    assert stat("reserved_bytes") == 10_000
    with pytest.raises(torch.OutOfMemoryError, match="10000 are reserved"):
        new(1)
    del most
    assert stat("reserved_bytes") == 0
    assert new(5000).tolist() == [255] * 5000  # It was freed, and is written over.


def test_a_step_can_be_made_to_fail_at_each_of_its_allocations():
    model = nn.Linear(4, 4).to("emu")
    x = torch.ones(2, 4, device="emu")

    def step() -> None:
        model(x).sum().backward()

    emu.configure()
    step()
    count = emu.counters()["allocations"]
    for k in range(1, count + 1):
        model.zero_grad()
        emu.configure(fail_at=k)
        with pytest.raises(torch.OutOfMemoryError, match=f"allocation {k},"):
            step()
    assert count > 3


def test_fresh_and_freed_memory_is_not_a_number():
    x = torch.empty(4, device="emu")
    assert all(map(math.isnan, x.tolist()))
    x.fill_(1.0)
    del x
    assert all(map(math.isnan, torch.empty(4, device="emu").tolist()))


def test_a_storage_is_resized_in_place():
    x = torch.arange(4.0, device="emu")
    storage = x.untyped_storage()
    storage.resize_(32)
    assert x.tolist() == [0, 1, 2, 3]
    before = stat("requested_bytes")
    storage.resize_(0)
    assert stat("requested_bytes") == before - 32
    storage.resize_(16)
    x.fill_(3.0)
    assert x.tolist() == [3.0] * 4


def test_page_locked_memory_is_counted_apart():
    before, reserved = emu.counters()["pinned_bytes"], stat("reserved_bytes")
    x = torch.ones(1024).pin_memory()
    assert x.is_pinned()
    assert not torch.ones(4).is_pinned()
    assert emu.counters()["pinned_bytes"] == before + 4096
    assert stat("reserved_bytes") == reserved
