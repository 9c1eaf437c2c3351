"""Random numbers when regions run in several threads at once.

torch's generators belong to the process. While one thread runs a region, another may
draw from the same generator, so that a recompute from the state before the region finds
other numbers; and a recompute that moves the generator back and forth disturbs the
other thread. A lock round whole regions would serialise threads, and deadlock those
that wait for each other inside a region.

So once a second thread runs regions, every region goes by *operators*: an observer
notes the generator's state before each random operator, and the recompute puts it
there for that operator alone. A lock is held for one operator. One thread alone, the
rule, pays nothing for this.

What is not covered: draws from Python's and NumPy's global streams in several threads
at once, and draws of torch's outside of every region, while another thread recomputes.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Generator, Tensor

from membudget._torch import is_random_operator
from membudget.observer import Observer

_HANDSHAKE_S = 1.0


class _Registry:
    """Which threads run regions.

    Attributes:
        owner: The identity of the one thread that runs regions.
        running: How many regions the owner is inside of, without isolation.
        shared: Whether there are several at a time.
        threads: The identities of those that are, or were when it began.
    """

    def __init__(self) -> None:
        self.owner = 0
        self.running = 0
        self.shared = False
        self.threads: set[int] = set()
        self.quiet = threading.Event()
        self.lock = threading.Lock()


_REGISTRY = _Registry()
OPERATOR_LOCK = threading.RLock()


def enter() -> bool:
    """Note that this thread enters a region, or the recompute of one.

    Returns:
        Whether this thread counted itself, and must `leave`.
    """
    registry = _REGISTRY
    me = threading.get_ident()
    # No call stands between asking and counting, so no thread can come between.
    if not registry.shared and me == registry.owner:
        registry.running += 1
        return True
    return _enter_slowly(registry, me)


def leave() -> None:
    """Note that this thread left what it was counted for."""
    registry = _REGISTRY
    registry.running -= 1
    if registry.shared and registry.running <= 0:
        registry.quiet.set()


def is_shared() -> bool:
    """Tell whether regions run in several threads at once."""
    return _REGISTRY.shared


def _enter_slowly(registry: _Registry, me: int) -> bool:
    """Make this thread the owner, or find that there are several."""
    with registry.lock:
        idle = not registry.shared and registry.running <= 0
        if idle or not _others_alive(registry, me):
            registry.owner, registry.running, registry.shared = me, 1, False
            registry.threads = {me}
            return True
        if not registry.shared:
            registry.quiet.clear()
            registry.shared = True
        registry.threads.add(me)
    # Regions that the owner is inside of restore whole states. It is given the time to
    # leave them; a bound, because it may be waiting for this very thread.
    if registry.running > 0 and me != registry.owner:
        registry.quiet.wait(_HANDSHAKE_S)
    return False


def _others_alive(registry: _Registry, me: int) -> bool:
    # By identity alone: a new thread may have the identity of one that has ended.
    alive = {thread.ident for thread in threading.enumerate()}
    return bool((registry.threads - {me}) & alive)


class RandomLog:
    """The state of the generator before each random operator of one forward."""

    __slots__ = ("states",)

    def __init__(self) -> None:
        """Begin with an empty log."""
        self.states: list[Tensor] = []

    def recorder(self) -> Observer:
        """Return the observer for the forward."""
        return _Record(self.states)

    def player(self) -> Observer:
        """Return the observer for one recompute."""
        return _Play(self.states)


class _Record(Observer):
    def __init__(self, states: list[Tensor]):
        self.states = states

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not is_random_operator(operator):
            return operator(*args, **kwargs)
        with OPERATOR_LOCK:
            self.states.append(generator_of(args, kwargs).get_state())
            return operator(*args, **kwargs)


class _Play(Observer):
    def __init__(self, states: list[Tensor]):
        self.states = iter(states)

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not is_random_operator(operator):
            return operator(*args, **kwargs)
        generator = generator_of(args, kwargs)
        with OPERATOR_LOCK:
            before = generator.get_state()
            # Past the end, the recompute has left the forward's way; that is found by
            # comparing tensors.
            generator.set_state(next(self.states, before))
            try:
                return operator(*args, **kwargs)
            finally:
                generator.set_state(before)


def generator_of(args: Any, kwargs: Any) -> Generator:
    """Return the generator from which an operator with these operands draws."""
    device = kwargs.get("device")
    for leaf in (*args, *kwargs.values()):  # No schema nests a generator.
        if isinstance(leaf, Generator):
            return leaf
        if isinstance(leaf, Tensor) and device is None:
            device = leaf.device
    if device is not None and torch.device(device).type == "cuda":
        index = torch.device(device).index
        current = torch.cuda.current_device() if index is None else index
        return torch.cuda.default_generators[current]
    return torch.default_generator
