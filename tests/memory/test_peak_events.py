"""The allocator's events, without the profiler's own output."""

from __future__ import annotations

import errno
import io
import os

import pytest
import torch

from membudget._torch import is_profiling
from membudget.memory.peak import quiet_stderr, recorded_events

pytestmark = pytest.mark.cpu_only("these are events of the CPU's allocator")


def test_allocations_and_releases_are_in_order():
    x = torch.zeros(1000)

    with recorded_events() as events:
        y = x.sin()
        z = x.cos()[:2]
        del y, z

    assert [change.bytes for change in events.memory] == [4000, 4000, -4000, -4000]
    names = [event.name() for event in events.others]
    assert names.index("aten::sin") < names.index("aten::cos")
    assert "[memory]" not in names


def test_releases_of_earlier_allocations_are_left_out():
    x = torch.zeros(1000)
    with recorded_events():
        seen = [x.sin() for _ in range(100)]
    addresses = {tensor.data_ptr() for tensor in seen}
    seen.clear()
    # Some of these lie where the profiler saw the allocation of another tensor.
    before = [x.sin() for _ in range(100)]
    assert addresses & {tensor.data_ptr() for tensor in before}

    with recorded_events() as events:
        before.clear()
        y = x.sin()
        del y

    assert [change.bytes for change in events.memory] == [4000, -4000]


def test_recording_ends_with_a_failure_and_prints_nothing(capfd):
    with pytest.raises(KeyError, match="mine"), recorded_events():
        raise KeyError("mine")

    assert not is_profiling()
    assert capfd.readouterr() == ("", "")


def test_only_output_inside_quiet_stderr_is_hidden(capfd):
    os.write(2, b"before ")
    with quiet_stderr():
        os.write(2, b"hidden ")
    os.write(2, b"after")

    assert capfd.readouterr().err == "before after"


def test_quiet_stderr_leaves_no_file_open():
    def is_open(number: int) -> bool:
        try:
            os.fstat(number)
        except OSError:
            return False
        return True

    before = [is_open(number) for number in range(64)]
    for _ in range(3):
        with quiet_stderr():
            pass
    assert [is_open(number) for number in range(64)] == before


def test_without_a_standard_error_there_is_nothing_to_hide():
    kept = os.dup(2)
    try:
        os.close(2)
        with quiet_stderr():
            ran = True
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert ran


@pytest.mark.parametrize("stderr", [None, io.TextIOWrapper(io.BytesIO())])
def test_a_process_without_an_open_stderr_can_record(monkeypatch, stderr):
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr("sys.stderr", stderr)

    with recorded_events() as events:
        torch.zeros(1000)

    assert events.memory[0].bytes == 4000


def test_without_a_descriptor_to_spare_nothing_is_hidden_and_none_is_lost(
    monkeypatch, capfd
):
    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    free = os.dup(2)
    os.close(free)
    with monkeypatch.context() as patch:
        patch.setattr("os.open", refused)
        with quiet_stderr():
            os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"

    next_one = os.dup(2)
    os.close(next_one)
    assert next_one == free
