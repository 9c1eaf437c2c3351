"""Save and restore the state of every random generator that a step may draw from.

Global generators are torch's default generators (for the CPU and each accelerator in
use), Python's `random`, and NumPy's legacy generator if NumPy is imported. Private
generators are attributes of a model or a batch; `walk` finds them.

A `Stream` reads and writes a generator's state through its public functions. A `Source`
accesses a state only if the state has changed, which makes capturing cheap: the engine
captures all generator states before every region, because a region may draw or reseed.
Before a `Source` reads a state, it asks `rng_memory` whether the state has changed. An
audit uses only `Stream` objects, so that it can detect a faulty `Source`.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Generator

from membudget._torch_accelerator import generator_of, generators, kind
from membudget.scope import Scope
from membudget.state.rng_memory import raw_state_reader

Noted = list[tuple["Source", tuple[Any, Any]]]


class Stream:
    """The state of one generator, read and written through public functions."""

    __slots__ = ("read", "write")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]):
        """Wrap the functions that read and write a generator's state."""
        self.read = read
        self.write = write


class Source(Stream):
    """The state of one generator; a cheap token tells whether the state has changed.

    The state is read again only after a random number was drawn, so consecutive regions
    share one copy, and restored only if the generator has advanced.
    """

    __slots__ = ("_last", "mark")

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        mark: Callable[[], Any] | None,
    ):
        """Create a `Source`; `mark` returns a token that changes with the state."""
        super().__init__(read, write)
        self.mark = mark if mark is not None else lambda: repr(read())
        self._last: tuple[Any, Any] | None = None

    def note(self) -> tuple[Any, Any]:
        """Return (token, state); the same tuple as long as the state is unchanged."""
        mark = self.mark()
        last = self._last
        if last is None or last[0] != mark:
            last = self._last = (mark, self.read())
        return last

    def bring_back(self, noted: tuple[Any, Any]) -> None:
        """Restore a state that `note` returned, unless the generator still has it."""
        if self.mark() != noted[0]:
            self.write(noted[1])


class Sources(tuple[Source, ...]):
    """The states of several generators, noted together.

    As long as nobody draws, all regions share one list of states.
    """

    _last: Noted | None = None

    def note(self) -> Noted:
        """Return all states; the same list as long as no state has changed."""
        last = self._last
        if last is not None:
            for source, (mark, _) in last:
                if source.mark() != mark:
                    break
            else:
                return last
        last = self._last = note(self)
        return last

    def enter(self, noted: Noted, scope: Scope) -> None:
        """Restore the states `noted`; return to the current ones after `scope`."""
        now = self.note()
        # Even if nothing needs restoring now: the code in `scope` may draw or reseed.
        scope.append((bring_all_back, (now,)))
        if now is not noted:
            bring_all_back(noted)


def note(sources: Iterable[Source]) -> Noted:
    """Return the current state of each random generator in `sources`."""
    return [(source, source.note()) for source in sources]


def bring_all_back(noted: Noted) -> None:
    """Restore recorded generator states."""
    for source, state in noted:
        source.bring_back(state)


def bring_back(noted: Noted, scope: Scope) -> None:
    """Restore recorded generator states; return to the current ones after `scope`."""
    for source, state in noted:
        now = source.note()
        scope.append((source.bring_back, (now,)))
        if now is not state:
            source.bring_back(state)


def stream_of(value: object) -> Stream | None:
    """Return a `Stream` for a torch, Python or NumPy generator; `None` for others.

    The result is also `None` for a generator without a state, such as
    `random.SystemRandom`, because its draws cannot be repeated.
    """
    if isinstance(value, Generator):
        return _torch_stream(value)
    if isinstance(value, random.Random):
        if isinstance(value, random.SystemRandom):
            return None
        return Stream(value.getstate, value.setstate)
    # Importing NumPy here would change the process that is audited.
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.RandomState):
        legacy: Any = value
        return Stream(partial(legacy.get_state, legacy=False), legacy.set_state)
    bits: Any = value
    if isinstance(value, numpy_random.Generator):
        bits = bits.bit_generator
    if isinstance(bits, numpy_random.BitGenerator):
        return Stream(lambda: bits.state, partial(setattr, bits, "state"))
    return None


def _torch_stream(generator: Generator) -> Stream:
    """Return a `Stream` for a `torch.Generator` on any device.

    States are stored as bytes, because a tensor would raise the measured memory peak.
    """

    def read() -> bytes:
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    def write(raw: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    return Stream(read, write)


def source_of(generator: Any) -> Source | None:
    """Return a `Source` for a torch, Python or NumPy generator; `None` for others."""
    if generator is torch.default_generator:
        return _CPU[0]
    if isinstance(generator, Generator):
        is_default = any(generator is other for other in generators())
        return (_default_source if is_default else _torch_source)(generator)
    stream = stream_of(generator)
    if stream is None:
        return None
    return Source(stream.read, stream.write, raw_state_reader(generator))


def private_sources(generators: Iterable[Any], torch_too: bool) -> list[Source]:
    """Return a `Source` for each non-global generator that a region can reach."""
    sources = [
        source_of(generator)
        for generator in generators
        if not any(generator is other for other in _default_generators())
        and (torch_too or not isinstance(generator, Generator))
    ]
    return [source for source in sources if source is not None]


def global_sources(torch_too: bool = True) -> Sources:
    """Return a `Source` for each global random generator."""
    return _global_sources(
        torch_too,
        "numpy.random" in sys.modules,
        generators() if torch_too else (),
    )


def torch_sources(devices: Iterable[torch.device]) -> Sources:
    """Return a `Source` for the default generators of the CPU and of other devices.

    Raises:
        CheckpointError: If the state of a device's generator cannot be read.
    """
    found = tuple(dict.fromkeys(map(generator_of, devices)))
    return Sources((*_CPU, *map(_default_source, found))) if found else _CPU


def global_streams() -> dict[str, Stream]:
    """Return a `Stream` for each global generator, keyed by name, for an audit."""
    generators = {
        "torch CPU": torch.default_generator,
        "Python random": random._inst,
        **_device_generators(),
    }
    if "numpy.random" in sys.modules:
        generators["NumPy"] = _numpy_generator()
    streams = {name: stream_of(generator) for name, generator in generators.items()}
    return {name: stream for name, stream in streams.items() if stream is not None}


def _device_generators() -> dict[str, Generator]:
    return {f"torch {kind()}:{i}": found for i, found in enumerate(generators())}


def _default_generators() -> tuple[Generator, ...]:
    return (torch.default_generator, *generators())


def _numpy_generator() -> Any:
    """Return the generator behind NumPy's module-level functions."""
    numpy_random: Any = sys.modules["numpy.random"]
    # The module-level functions are methods of one hidden `RandomState`.
    return numpy_random.get_state.__self__


def frozen(state: Any) -> Any:
    """Convert a generator state to tuples and bytes, which `==` compares bitwise."""
    if isinstance(state, torch.Tensor):
        return bytes(state.flatten().tolist())
    if isinstance(state, Mapping):
        return tuple((key, frozen(state[key])) for key in sorted(state))
    if isinstance(state, tuple | list):
        return tuple(frozen(item) for item in state)
    tobytes: Callable[[], bytes] | None = getattr(state, "tobytes", None)
    return state if tobytes is None else tobytes()


def _torch_source(generator: Generator) -> Source:
    stream = _torch_stream(generator)
    mark = raw_state_reader(generator) or stream.read
    return Source(stream.read, stream.write, mark)


_CPU = Sources((_torch_source(torch.default_generator),))
_PYTHON = Source(random.getstate, random.setstate, raw_state_reader(random._inst))


@cache
def _default_source(generator: Generator) -> Source:
    return _torch_source(generator)


@cache
def _global_sources(
    torch_too: bool, numpy_too: bool, of_devices: tuple[Generator, ...]
) -> Sources:
    sources = [_PYTHON]
    if torch_too:
        sources += _CPU
    if numpy_too:
        source = source_of(_numpy_generator())
        sources += [source] if source is not None else []
    return Sources((*sources, *map(_default_source, of_devices)))
