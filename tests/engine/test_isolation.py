"""The generator that an operator draws from, and who runs regions."""

from __future__ import annotations

import _thread
import threading
from types import SimpleNamespace

import pytest
import torch

from membudget.engine import isolation
from membudget.engine.isolation import generator_of
from membudget.errors import CheckpointError
from tests.accelerators import pretend

X = torch.zeros(2)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Two CUDA devices, of which the second is the current one."""
    pretended = pretend(monkeypatch)
    pretended.current = 1
    return pretended.generators


def test_a_generator_that_is_given_is_the_one():
    generator = torch.Generator()
    assert generator_of((X, 0.5, generator), {}) is generator
    assert generator_of((X,), {"generator": generator}) is generator
    assert generator_of((X,), {"device": "cuda:0", "generator": generator}) is generator


def test_on_the_cpu_it_is_torch_s_own():
    assert generator_of((X,), {}) is torch.default_generator
    assert generator_of(([2, 3],), {}) is torch.default_generator
    assert generator_of(([2, 3],), {"device": torch.device("cpu")}) is (
        torch.default_generator
    )
    assert generator_of((X,), {"generator": None}) is torch.default_generator


@pytest.mark.parametrize(
    ("device", "index"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)]
)
def test_on_a_device_it_is_the_one_of_that_device(two, device, index):
    assert generator_of(([2],), {"device": device}) is two[index]
    assert generator_of(([2],), {"device": torch.device(device)}) is two[index]
    # The device that is named wins over that of an operand.
    assert generator_of((X,), {"device": device}) is two[index]


class OnDevice(torch.Tensor):
    """A tensor that says it lies on a CUDA device."""

    device = torch.device("cuda:1")


def test_beside_a_tensor_on_a_device_one_on_the_cpu_is_a_number(two):
    on_device = torch.zeros(2).as_subclass(OnDevice)
    assert generator_of((X, on_device), {}) is two[1]
    assert generator_of((on_device, X), {}) is two[1]


@pytest.mark.parametrize("device", ["xpu:0", "cuda:2"])
def test_a_device_whose_generator_cannot_be_read_is_an_error(two, device):
    with pytest.raises(CheckpointError, match=f"generator of {device} cannot be read"):
        generator_of(([2],), {"device": device})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> isolation._Registry:
    """Return the registry as it begins; the extension in C++ holds this very object."""
    fresh = isolation._Registry()
    for name in isolation._Registry.__slots__:
        monkeypatch.setattr(isolation.REGISTRY, name, getattr(fresh, name))
    monkeypatch.setattr(isolation, "_HANDSHAKE_S", 0.01)
    return isolation.REGISTRY


def in_thread(act):
    """Return what a function returns in another thread, while this one waits."""
    box = SimpleNamespace()
    thread = threading.Thread(target=lambda: setattr(box, "result", act()))
    thread.start()
    thread.join()
    return box.result


def in_thread_of_c(act):
    """Return what a function returns in a thread that Python did not start."""
    box, over = SimpleNamespace(), threading.Event()

    def run() -> None:
        box.result = act()
        over.set()

    _thread.start_new_thread(run, ())
    assert over.wait(60)
    return box.result


def test_one_thread_alone_counts_and_is_never_shared(registry):
    assert isolation.enter()
    assert isolation.enter()
    assert registry.running == 2
    isolation.leave()
    isolation.leave()
    assert registry.running == 0
    assert not isolation.is_shared()


def test_threads_one_after_another_are_not_shared(registry):
    def enter_and_leave() -> bool:
        counted = isolation.enter()
        isolation.leave()
        return counted

    assert enter_and_leave()
    assert in_thread(enter_and_leave)
    assert enter_and_leave()
    assert not isolation.is_shared()
    assert registry.running == 0


def test_a_second_thread_while_the_first_is_inside_makes_them_shared(registry):
    assert isolation.enter()
    assert not in_thread(isolation.enter)
    assert isolation.is_shared()
    assert registry.running == 1
    # From now on nobody counts.
    isolation.leave()
    assert registry.running == 0
    assert registry.quiet.is_set()


def test_alone_again_a_thread_is_the_owner_again(registry):
    assert isolation.enter()
    in_thread(isolation.enter)
    isolation.leave()
    assert isolation.is_shared()
    # The other thread has ended.
    assert isolation.enter()
    assert not isolation.is_shared()
    assert registry.owner == threading.get_ident()
    assert registry.threads == {threading.get_ident()}
    isolation.leave()


def test_as_long_as_the_other_thread_lives_they_are_shared(registry):
    entered, over = threading.Event(), threading.Event()

    def stay() -> None:
        isolation.enter()
        entered.set()
        over.wait(60)

    assert isolation.enter()
    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(60)
    isolation.leave()
    assert not isolation.enter()
    assert isolation.is_shared()
    over.set()
    thread.join()
    assert isolation.enter()
    assert not isolation.is_shared()
    isolation.leave()


def test_a_thread_of_autograd_is_no_other_thread_once_it_has_left(registry):
    def enter_as_one_that_logs() -> bool:
        threading.current_thread()  # Python lists the thread from now on.
        return isolation.enter()

    assert isolation.enter()
    assert not in_thread_of_c(enter_as_one_that_logs)
    assert isolation.is_shared()
    isolation.leave()
    assert isolation.enter()
    assert not isolation.is_shared()
    isolation.leave()


def test_threads_of_autograd_that_run_regions_at_once_are_shared(registry):
    def enter_beside_another() -> bool:
        assert isolation.enter()
        return in_thread_of_c(isolation.enter)

    assert not in_thread_of_c(enter_beside_another)
    assert isolation.is_shared()
