"""Isolate the random numbers of regions that run in several threads at once.

Torch's default generators are process-wide. If another thread draws from a generator
while a region runs, rewinding the generator does not reproduce the region's numbers,
and disturbs the other thread. A lock around whole regions would serialise the threads,
and cause a deadlock if threads wait for each other inside regions.

Once a second thread runs regions, all regions therefore isolate individual *operators*:
an observer records the generator's state before each random operator, and the recompute
restores that state for that operator alone. A process-wide lock is held only while a
random operator runs. While only one thread runs regions, the usual case, isolation
costs nothing.

Two cases are not covered: concurrent draws from Python's or NumPy's global streams, and
draws from torch's generators outside any region while another thread recomputes.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Generator, Tensor

from membudget._torch import current_graph_task_id, is_random_operator
from membudget._torch_accelerator import HOST, waits_in_backward
from membudget._torch_accelerator import generator_of as default_generator_of
from membudget.observer import Observer

_HANDSHAKE_S = 1.0  # How long a second thread waits for the owner to leave its regions.


class _Registry:
    """Records which threads run regions.

    Attributes:
        owner: Identity of the thread that runs regions alone, without isolation.
        running: Number of regions and recomputes that `owner` has entered but not left.
        shared: Whether several threads run regions.
        threads: Identities of threads that entered regions, including those that left.
    """

    __slots__ = ("lock", "owner", "quiet", "running", "shared", "threads")

    def __init__(self) -> None:
        self.owner = 0
        self.running = 0
        self.shared = False
        self.threads: set[int] = set()
        self.quiet = threading.Event()
        self.lock = threading.Lock()


REGISTRY = _Registry()
# `RLock` is a function, whose call takes as long as making the lock.
Lock = type(threading.RLock())
OPERATOR_LOCK = Lock()


def enter() -> bool:
    """Register that this thread enters a region or a recompute.

    Returns:
        Whether the call to `enter` was counted; if so, the caller must call `leave`.
    """
    registry = REGISTRY
    me = threading.get_ident()
    # No call separates the test from the increment, so the GIL cannot switch threads.
    if not registry.shared and me == registry.owner:
        registry.running += 1
        return True
    return _enter_slowly(registry, me)


def leave() -> None:
    """Register that this thread left a region or recompute that `enter` counted."""
    registry = REGISTRY
    registry.running -= 1
    if registry.shared and registry.running <= 0:
        registry.quiet.set()


def is_shared() -> bool:
    """Return whether several threads run regions."""
    return REGISTRY.shared


def _enter_slowly(registry: _Registry, me: int) -> bool:
    """Register this thread; isolate random operators if other threads run regions."""
    with registry.lock:
        idle = not registry.shared and registry.running <= 0
        if idle or not _others_may_run(registry, me):
            registry.owner, registry.running, registry.shared = me, 1, False
            registry.threads = {me}
            return True
        if not registry.shared:
            registry.quiet.clear()
            registry.shared = True
        registry.threads.add(me)
    # The owner's open regions restore whole generator states, so give it time to leave
    # them. Wait for a limited time, because the owner may be waiting for this thread;
    # on a device, it surely is if it has begun a backward pass inside a region.
    if registry.running > 0 and me != registry.owner and not _serves(registry.owner):
        registry.quiet.wait(_HANDSHAKE_S)
    return False


def _serves(owner: int) -> bool:
    """Return whether this thread runs a backward pass, and `owner` waits for one."""
    return current_graph_task_id() >= 0 and waits_in_backward(owner)


def _others_may_run(registry: _Registry, me: int) -> bool:
    """Return whether another thread runs a region now, or may run one again."""
    if registry.owner != me and registry.running > 0:
        return True
    # A new thread may reuse the identity of one that has ended. Autograd's own threads
    # run regions for a thread that waits for them; Python lists them for good once code
    # in them has asked for its thread, as each message that is logged does.
    listed = threading.enumerate()
    alive = {t.ident for t in listed if not isinstance(t, threading._DummyThread)}
    return bool((registry.threads - {me}) & alive)


class DrawRecorder(Observer):
    """Records the generator's state before each random operator of a forward."""

    def __init__(self, states: list[Tensor]):
        """Prepare to append the recorded generator states to `states`."""
        self.states = states

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator; if it is random, record the generator's state first."""
        if not is_random_operator(operator):
            return operator(*args, **kwargs)
        with OPERATOR_LOCK:
            self.states.append(generator_of(args, kwargs).get_state())
            return operator(*args, **kwargs)


class DrawPlayer(Observer):
    """Runs each random operator of a recompute with its recorded generator state."""

    def __init__(self, states: list[Tensor]):
        """Prepare to use the generator states in `states`, one per random operator."""
        self.states = iter(states)

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator; if it is random, use the recorded generator state."""
        if not is_random_operator(operator):
            return operator(*args, **kwargs)
        generator = generator_of(args, kwargs)
        with OPERATOR_LOCK:
            before = generator.get_state()
            # Past the end, the recompute no longer matches the forward; comparing the
            # saved tensors reports that.
            generator.set_state(next(self.states, before))
            try:
                return operator(*args, **kwargs)
            finally:
                generator.set_state(before)


def generator_of(args: Any, kwargs: Any) -> Generator:
    """Return the generator from which an operator with these arguments draws.

    Raises:
        CheckpointError: If the state of the generator cannot be read.
    """
    device = HOST
    for leaf in (*args, *kwargs.values()):  # No schema nests a generator.
        if isinstance(leaf, Tensor):
            if device == HOST:  # Beside tensors on a device, it is a number.
                device = leaf.device
        elif isinstance(leaf, Generator):
            return leaf
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
    return default_generator_of(device)
