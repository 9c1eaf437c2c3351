"""Every source of random numbers that a region may draw from.

Rerun must find each source where the forward found it, and leave it where it was. The
state is noted before every region, whether or not it draws: a function may also reseed,
so that a state that is the same afterwards proves nothing.

Noting must be cheap. torch's generators hand out a small tensor. Python and NumPy
build large objects (13 µs and 42 µs, where a whole region may take 60), so for these
two a raw look at the generator's memory serves as a *mark*, and the state proper, by
the public functions, is read only when the mark is a new one. The raw bytes are never
written back. `_raw_look_is_honest` tries the trick once a process; where it fails, the
public functions are used alone.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Generator

from membudget.engine.scope import Scope


class Source(Protocol):
    """A source of random numbers whose state can be noted and brought back."""

    def note(self) -> Any:
        """Return what `enter` needs to bring the source back to where it is now."""

    def enter(self, noted: Any, scope: Scope) -> None:
        """Bring the source back until `scope` ends; then it is where it was before."""


class TorchSource:
    """One `torch.Generator`, of whichever device.

    Its state is kept as bytes: no tensor of ours is alive when a step is at its peak,
    and regions between which nothing is drawn share one object.
    """

    __slots__ = ("_generator", "_last")

    def __init__(self, generator: Generator):
        """Watch `generator`."""
        self._generator = generator
        self._last = b""

    def note(self) -> bytes:
        """Return the state; the same object if nothing was drawn since."""
        state = self._generator.get_state()
        raw = ctypes.string_at(state.data_ptr(), state.numel())
        if raw != self._last:
            self._last = raw
        return self._last

    def enter(self, noted: bytes, scope: Scope) -> None:
        """Bring the generator back until `scope` ends."""
        now = self.note()
        scope.callback(self._write, now)
        if now is not noted:
            self._write(noted)

    def _write(self, raw: bytes) -> None:
        state = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self._generator.set_state(state)


class _DearSource:
    """A source with a dear public state and a cheap mark.

    The last pair of both is remembered, so that regions between which nothing is drawn
    share one state object; and what did not move is not written.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[Any, Any] | None = None

    def mark(self) -> Any:
        raise NotImplementedError

    def read(self) -> Any:
        raise NotImplementedError

    def write(self, state: Any) -> None:
        raise NotImplementedError

    def note(self) -> tuple[Any, Any]:
        """Return mark and state; the same pair if nothing was drawn since."""
        mark = self.mark()
        last = self._last
        if last is None or last[0] != mark:
            last = self._last = (mark, self.read())
        return last

    def enter(self, noted: tuple[Any, Any], scope: Scope) -> None:
        """Bring the source back until `scope` ends."""
        now = self.note()
        scope.callback(self._bring_back, now)
        if now[0] != noted[0]:
            self.write(noted[1])

    def _bring_back(self, noted: tuple[Any, Any]) -> None:
        if self.mark() != noted[0]:
            self.write(noted[1])


class PythonSource(_DearSource):
    """A `random.Random`, the module-level one above all."""

    __slots__ = ("_memory", "generator")

    def __init__(self, generator: random.Random):
        """Watch `generator`."""
        super().__init__()
        self.generator = generator
        honest = _raw_look_is_honest(random.Random)
        self._memory = _memory(generator) if honest else None

    def mark(self) -> Any:
        """Return the raw words of the Mersenne twister and the spare Gaussian."""
        if self._memory is None:
            return self.read()
        return self._memory.raw, self.generator.gauss_next  # type: ignore[attr-defined]

    def read(self) -> Any:
        """Return `getstate()`."""
        return self.generator.getstate()

    def write(self, state: Any) -> None:
        """Put a state back."""
        self.generator.setstate(state)


class NumpyLegacySource(_DearSource):
    """A `numpy.random.RandomState`, the one behind `numpy.random.rand` above all."""

    __slots__ = ("_memory", "generator")

    def __init__(self, generator: Any):
        """Watch `generator`."""
        super().__init__()
        self.generator = generator
        self._memory = None
        if _is_mt19937(generator) and _raw_look_is_honest(generator.__class__):
            self._memory = _memory(generator)

    def mark(self) -> Any:
        """Return the raw memory of the object and of its Mersenne twister."""
        generator = self.generator
        if self._memory is None or not _is_mt19937(generator):
            return repr(self.read())
        address = generator._bit_generator.ctypes.state_address
        return self._memory.raw, ctypes.string_at(address, _MT19937_BYTES)

    def read(self) -> Any:
        """Return `get_state(legacy=False)`."""
        return self.generator.get_state(legacy=False)

    def write(self, state: Any) -> None:
        """Put a state back."""
        self.generator.set_state(state)


def _is_mt19937(generator: Any) -> bool:
    return type(generator._bit_generator).__name__ == "MT19937"


class NumpySource:
    """A `numpy.random.Generator`."""

    __slots__ = ("_generator",)

    def __init__(self, generator: Any):
        """Watch `generator`."""
        self._generator = generator

    def note(self) -> Any:
        """Return the state of its bits."""
        return self._generator.bit_generator.state

    def enter(self, noted: Any, scope: Scope) -> None:
        """Bring the generator back until `scope` ends."""
        scope.callback(self._write, self.note())
        self._write(noted)

    def _write(self, state: Any) -> None:
        self._generator.bit_generator.state = state


_MT19937_BYTES = 624 * 4 + 4  # Its words and its position: NumPy's documented struct.


def _memory(thing: object) -> Any:
    """Return a view of an object of C type, without its reference count.

    The view does not keep the object alive; whoever holds it must.
    """
    header = object.__basicsize__
    size = type(thing).__basicsize__ - header
    return (ctypes.c_char * size).from_address(id(thing) + header)


@cache
def _raw_look_is_honest(kind: Any) -> bool:
    """Tell whether the raw memory of a `kind` moves whenever a number is drawn.

    A Mersenne twister moves with each draw, but the second of two Gaussians comes from
    a spare that is kept beside it, so both draws are tried.
    """
    if sys.implementation.name != "cpython":
        return False
    if kind is random.Random:
        probe = random.Random(0)
        before = _memory(probe).raw
        probe.random()
        return bool(before != _memory(probe).raw)
    twin = kind(0)
    bits = twin._bit_generator.ctypes.state_address
    looks = []
    for _ in range(3):
        looks.append((_memory(twin).raw, ctypes.string_at(bits, _MT19937_BYTES)))
        twin.standard_normal()
    return looks[0] != looks[1] != looks[2]


PYTHON = PythonSource(random._inst)
CPU = TorchSource(torch.default_generator)


@cache
def _numpy_global(numpy_random: Any) -> NumpyLegacySource:
    return NumpyLegacySource(numpy_random.get_state.__self__)


def global_sources(torch_too: bool = True) -> list[Source]:
    """Return the sources that any code can draw from without naming one.

    Python's `random`, NumPy's if NumPy was imported, the CPU's generator, and those of
    the CUDA devices if CUDA is in use.

    Args:
        torch_too: Whether torch's generators are wanted.
    """
    sources: list[Source] = [PYTHON]
    if torch_too:
        sources.append(CPU)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        sources.append(_numpy_global(numpy_random))
    if torch_too and torch.cuda.is_initialized():
        sources.extend(map(TorchSource, torch.cuda.default_generators))
    return sources


def torch_sources(device_indices: Callable[[], Iterable[int]]) -> list[Source]:
    """Return the sources that torch's own checkpoint brings back.

    Args:
        device_indices: Asked for the CUDA devices, if CUDA is in use.
    """
    sources: list[Source] = [CPU]
    if torch.cuda.is_initialized():
        generators = torch.cuda.default_generators
        sources += [TorchSource(generators[i]) for i in sorted(set(device_indices()))]
    return sources


def private_sources(generators: Iterable[object], torch_too: bool) -> list[Source]:
    """Return the sources behind generator objects that a region can reach.

    Args:
        generators: Generators of torch, Python and NumPy.
        torch_too: Whether torch's generators are wanted.
    """
    sources: list[Source] = []
    numpy_random: Any = sys.modules.get("numpy.random")
    for generator in generators:
        if isinstance(generator, Generator):
            if torch_too and generator is not torch.default_generator:
                sources.append(TorchSource(generator))
        elif isinstance(generator, random.SystemRandom):
            continue  # It has no state.
        elif isinstance(generator, random.Random):
            sources.append(PythonSource(generator))
        elif isinstance(generator, numpy_random.Generator):
            sources.append(NumpySource(generator))
        else:
            sources.append(NumpyLegacySource(generator))
    return sources


class Drawn:
    """Where each source stood before a region."""

    __slots__ = ("_noted",)

    def __init__(self, sources: Iterable[Source]):
        """Note every source."""
        self._noted = [(source, source.note()) for source in sources]

    def enter(self, scope: Scope) -> None:
        """Put every source where the forward found it, until `scope` ends."""
        for source, noted in self._noted:
            source.enter(noted, scope)
