"""Live bytes and their peak, at any time."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from membudget.memory.counting import Counted
from tests import devices
from tests.field.counting_allocator import NoCompilerError, restarted

MIB = 1 << 20


@pytest.fixture
def counts():
    gc.collect()
    devices.settle()
    found = Counted(torch.get_default_device())
    found.start()
    if not found.is_exact:
        pytest.skip("there is no C++ compiler")
    yield found
    found.stop()


def test_live_bytes_follow_allocations_and_releases(counts):
    before = counts.live_bytes()
    x = torch.zeros(MIB)
    assert counts.live_bytes() - before == 4 * MIB
    del x
    assert counts.live_bytes() == before


def test_the_peak_begins_anew_at_a_restart(counts):
    before = counts.live_bytes()
    counts.restart()  # The most that this process ever held may be more.
    torch.zeros(MIB)
    assert counts.peak_bytes() - before == 4 * MIB
    counts.restart()
    torch.zeros(1024)
    assert counts.peak_bytes() - before == 4096


def test_a_restart_is_of_one_count_alone(counts):
    other = Counted(counts.device)
    other.start()
    try:
        before = counts.live_bytes()
        counts.restart()
        torch.zeros(MIB)
        other.restart()
        assert counts.peak_bytes() - before == 4 * MIB
        assert other.peak_bytes() == before
        assert counts.bounded_bytes()[1] >= other.bounded_bytes()[1]
    finally:
        other.stop()


def test_tensors_from_before_count():
    x = torch.zeros(MIB, device="cpu")
    gc.collect()
    counts = Counted(torch.device("cpu"))
    counts.start()
    try:
        if counts.is_exact:
            assert counts.live_bytes() >= 4 * MIB
    finally:
        counts.stop()
    del x


def test_tensors_that_autograd_alone_holds_count(counts):
    x = torch.zeros(1024, requires_grad=True)
    before = counts.live_bytes()
    loss = x.exp().sum()
    assert counts.live_bytes() - before >= 4096
    del loss
    assert counts.live_bytes() == before


def test_two_may_count_at_once(counts):
    other = Counted(counts.device)
    other.start()
    assert other.live_bytes() == counts.live_bytes()
    other.stop()
    assert counts.is_exact


@pytest.mark.cpu_only("it is about the CPU's allocator")
def test_another_allocator_may_be_put_in_front_between_two_counts(counts):
    kept = torch.zeros(1024)
    counts.stop()
    try:
        restarted()  # Another counter stands in front of torch's allocator from now on.
    except NoCompilerError as error:
        pytest.skip(str(error))
    counts.start()
    assert counts.is_exact
    before = counts.live_bytes()
    made = torch.zeros(1024)
    assert counts.live_bytes() - before == 4096
    del kept, made
    assert counts.live_bytes() <= before


@pytest.mark.cpu_only("asks torch's allocator of the CPU for too much")
def test_an_allocation_that_fails_is_counted(counts):
    before = counts.failures()
    torch.zeros(MIB)
    assert counts.failures() == before
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(1 << 52)
    assert counts.failures() == before + 1


def made_before(counts):
    """Return a tensor of 4 MiB that was made uncounted, before counting began."""
    counts.stop()
    made = torch.zeros(MIB)
    counts.start()
    return made


@pytest.mark.cpu_only("an accelerator's allocator sees every release")
def test_a_tensor_from_before_counts_until_it_is_freed(counts):
    x = made_before(counts)
    before = counts.live_bytes()
    del x
    assert counts.live_bytes() == before - 4 * MIB


@pytest.mark.cpu_only("an accelerator's allocator sees every release")
def test_a_storage_from_before_that_is_resized_counts_once(counts):
    x = made_before(counts)
    before = counts.live_bytes()
    x.untyped_storage().resize_(0)
    assert counts.live_bytes() == before - 4 * MIB
    x.untyped_storage().resize_(4 * MIB)
    assert counts.live_bytes() == before


@pytest.mark.cpu_only("an accelerator's allocator sees every release")
def test_who_counts_later_finds_what_lives_although_another_has_counted_on(counts):
    x = made_before(counts)
    del x
    other = Counted(counts.device)
    other.start()
    try:
        alone = Counted(counts.device).live_bytes()  # That of tensors in Python.
        assert other.live_bytes() == counts.live_bytes() == alone
    finally:
        other.stop()


@pytest.mark.cpu_only("an accelerator has no counter of ours")
def test_who_is_not_stopped_counts_no_longer_than_it_lives(counts):
    counts.stop()
    other = Counted(counts.device)
    other.start()
    extension, before = other._extension, other.live_bytes()
    del other
    kept = torch.zeros(MIB)
    assert extension.live() == before
    del kept


@pytest.mark.cpu_only("it is about the CPU's allocator")
def test_an_allocator_that_was_put_in_front_while_one_counted_is_left_there(counts):
    code = (
        "import torch\n"
        "from membudget.memory.counting import Counted\n"
        "from tests.field.counting_allocator import restarted\n"
        "counts = Counted(torch.device('cpu'))\n"
        "counts.start()\n"
        "restarted()\n"
        "counts.stop()\n"
        "counts.start()\n"
        "before = counts.live_bytes()\n"
        "kept = torch.zeros(1024)\n"
        "print(counts.is_exact, counts.live_bytes() - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, ["True", "4096"]), run.stderr


@pytest.mark.cpu_only("an accelerator's allocator sees every release")
def test_what_python_does_not_know_when_counting_begins_does_not_count(counts):
    x = torch.zeros(MIB, requires_grad=True)
    loss = x.exp().sum()  # Autograd alone holds 4 MiB.
    counts.stop()
    counts.start()
    before = counts.live_bytes()
    assert before == Counted(counts.device).live_bytes()
    del loss
    assert counts.live_bytes() <= before
    assert counts.live_bytes() > before - 4 * MIB


# Of each fork, a thread is likely to be at the counter; a child that hangs is killed.
FORKS = """\
import os
import signal
import threading
import torch
from membudget.memory.counting import Counted

counts = Counted(torch.device("cpu"))
counts.start()
tensors = [torch.ones(1) for _ in range(1000)]
is_over = threading.Event()

def allocate():
    while not is_over.is_set():
        torch._foreach_add(tensors, 1)  # Without the interpreter's lock.

thread = threading.Thread(target=allocate)
thread.start()
statuses = set()
for _ in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        torch.empty(10)
        os._exit(0)
    statuses.add(os.waitpid(child, 0)[1])
    if statuses != {0}:
        break
is_over.set()
thread.join()
print(statuses)
"""


@pytest.mark.cpu_only("it is about the CPU's allocator")
def test_a_process_that_forks_while_another_thread_allocates_can_allocate(counts):
    command = [sys.executable, "-c", FORKS]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.stdout == "{0}\n", run.stderr
