"""The disk: what goes there comes back, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import membudget as mb
from membudget.offload.disk import BLOCK, CHUNK, Disk
from membudget.offload.extents import Extent

WIDTH = 64
BYTES = 256 * WIDTH * 4
"""Of a batch."""


@given(
    asked=st.lists(
        st.tuples(st.integers(1, 3 * BLOCK), st.booleans()), min_size=1, max_size=20
    )
)
def test_what_is_written_comes_back_until_its_place_is_given_to_others(
    asked: list[tuple[int, bool]],
) -> None:
    disk = Disk(12 * BLOCK, None)
    there: list[tuple[Extent, Tensor]] = []
    for number, (size, gives_back) in enumerate(asked):
        content = torch.full((size,), number, dtype=torch.uint8, device="cpu")
        place = disk.write(content)
        if place is not None:
            there.append((place, content))
        if gives_back and there:
            place, content = there.pop(len(there) // 2)
            disk.give_back(place, content.nbytes)
        for place, content in there:
            disk.read(place, found := torch.zeros_like(content))
            assert torch.equal(found, content)
    assert disk.used_bytes <= disk.size
    for place, content in there:
        disk.give_back(place, content.nbytes)
    assert disk.used_bytes == 0


def test_more_than_one_read_takes_comes_back() -> None:
    disk = Disk(3 * CHUNK, None)
    content = torch.arange(CHUNK // 4 + 5, dtype=torch.int64, device="cpu")
    place = disk.write(content.view(torch.uint8))
    assert place is not None
    found = torch.zeros_like(content)
    disk.read(place, found.view(torch.uint8))
    assert torch.equal(found, content)


def test_a_place_comes_back_while_others_are_written() -> None:
    disk = Disk(BLOCK, None)
    place = disk.write(torch.zeros(BLOCK, dtype=torch.uint8, device="cpu"))

    with disk._lock:  # As when garbage is collected inside of `write`.
        dropping = Thread(target=disk.give_back, args=(place, BLOCK), daemon=True)
        dropping.start()
        dropping.join(timeout=10)
        assert not dropping.is_alive()

    assert disk.used_bytes == 0
    content = torch.ones(BLOCK, dtype=torch.uint8, device="cpu")
    assert disk.write(content) == place


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
    return nn.Sequential(*parts)


def gradients(model: nn.Module, off: mb.Offload | None) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(256, WIDTH)
    if off is None:
        loss = model(x).square().sum()
    else:
        with off:
            loss = model(x).square().sum()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_full_host_goes_on_to_the_disk(tmp_path: Path) -> None:
    model = chain()
    expected = gradients(model, None)
    off = mb.offload(2 * BYTES, window=0, disk="16MiB", folder=tmp_path)
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, off), expected))
    status = off.status()
    assert status.spilled_bytes == status.out_bytes - 3 * 2 * BYTES > 0
    assert status.full_bytes == 0
    assert status.most_host_bytes <= 2 * BYTES
    assert "and on to the disk" in str(status)
    assert list(tmp_path.iterdir()) == []


def test_where_the_disk_is_full_too_tensors_stay_on_the_device() -> None:
    model = chain()
    expected = gradients(model, None)
    off = mb.offload(2 * BYTES, window=0, disk=BYTES)
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, off), expected))
    assert off.status().spilled_bytes == 3 * BYTES
    assert off.status().full_bytes


def test_a_system_that_cannot_reserve_the_bytes_of_a_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    off = mb.offload("1MiB", disk="1MiB", folder=tmp_path)
    with pytest.raises(mb.OptionError, match=r"disk= needs os\.posix_fallocate, which"):
        off.open()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cpu_only("another process runs")
def test_membudget_is_imported_where_there_is_no_fcntl() -> None:
    program = "import sys, torch; sys.modules['fcntl'] = None; import membudget.offload"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_disk_without_that_much_room_is_an_error_before_the_step(
    tmp_path: Path,
) -> None:
    off = mb.offload("1MiB", disk=1 << 60, folder=tmp_path)
    with (
        pytest.raises(mb.OptionError, match=r"no file of .* for offloaded tensors"),
        off,
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(mb.OptionError, match="No such file"),
        mb.offload("1MiB", disk="1MiB", folder=tmp_path / "absent"),
    ):
        pass


KILLED = """
import os, signal, sys
import torch
import membudget as mb

off = mb.offload("256KiB", window=0, disk="16MiB", folder=sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
with off:
    loss = model(torch.randn(256, 64)).square().sum()
assert off.status().spilled_bytes
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.cpu_only("another process runs")
def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ours = {**os.environ, "PYTHONPATH": str(Path(mb.__file__).parents[1])}
    done = subprocess.run(
        command, env=ours, check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []
