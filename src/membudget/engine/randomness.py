"""Every source of random numbers that a region may draw from.

Rerun must find each source where the forward found it, and leave it where it was. So
a forward reads the sources when it begins and again when it ends; what did not move in
between was not drawn from, and is neither kept nor touched later.

Reading must be cheap, because every region does it. torch's generators hand out a
small tensor. Python and NumPy build large objects (13 µs and 42 µs where a whole region
may take 60), so for these two a raw look at the generator's memory serves as a
*mark*, and the state proper, by the public functions, is read only when the mark is a
new one. The raw bytes are never written back. `_raw_look_is_honest`
tries the trick once a process; where it fails, the public functions are used alone.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from membudget.engine.scope import Scope


class Source(Protocol):
    """A source of random numbers whose state can be read and put back."""

    def look(self) -> tuple[Any, Any]:
        """Return a mark, which is equal as long as nothing is drawn, and the state."""

    def mark(self) -> Any:
        """Return the mark alone."""

    def write(self, state: Any) -> None:
        """Put a state back."""


class TorchSource:
    """One `torch.Generator`, of whichever device."""

    __slots__ = ("_generator", "state")

    def __init__(self, generator: Generator):
        """Watch `generator`."""
        self.state: Callable[[], Tensor] = generator.get_state
        self._generator = generator

    def look(self) -> tuple[bytes, Tensor]:
        """Return the state as bytes, which compare quickly, and as a tensor."""
        state = self.state()
        return ctypes.string_at(state.data_ptr(), state.numel()), state

    def mark(self) -> bytes:
        """Return the state as bytes."""
        return self.look()[0]

    def write(self, state: Tensor) -> None:
        """Put a state back."""
        self._generator.set_state(state)


class _DearSource:
    """A source with a dear public state and a cheap mark.

    The last pair of both is remembered, so that regions between which nothing is drawn
    share one state object.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[Any, Any] | None = None

    def mark(self) -> Any:
        raise NotImplementedError

    def read(self) -> Any:
        raise NotImplementedError

    def look(self) -> tuple[Any, Any]:
        """Return mark and state; the same pair if nothing was drawn since."""
        mark = self.mark()
        last = self._last
        if last is None or last[0] != mark:
            last = self._last = (mark, self.read())
        return last


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

    __slots__ = ("generator",)

    def __init__(self, generator: Any):
        """Watch `generator`."""
        self.generator = generator

    def look(self) -> tuple[str, Any]:
        """Return the state of its bits, a dict that may hold arrays, as text too."""
        state = self.generator.bit_generator.state
        return repr(state), state

    def mark(self) -> str:
        """Return the state as text."""
        return self.look()[0]

    def write(self, state: Any) -> None:
        """Put a state back."""
        self.generator.bit_generator.state = state


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
    """What a region drew from, and where each source stood before.

    Begin it before the function runs and `finish` it after.
    """

    __slots__ = ("_before", "_marks")

    def __init__(self, sources: Iterable[Source]):
        """Read every source, with a mark by which `finish` tells what moved."""
        self._before: list[tuple[Source, Any]] = []
        self._marks: list[Any] = []
        for source in sources:
            mark, state = source.look()
            self._before.append((source, state))
            self._marks.append(mark)

    def finish(self) -> None:
        """Forget the sources that did not move."""
        self._before = [
            pair
            for pair, mark in zip(self._before, self._marks, strict=True)
            if pair[0].mark() != mark
        ]
        self._marks = []

    def enter(self, scope: Scope) -> None:
        """Put every source where the forward found it, until `scope` ends."""
        for source, state in self._before:
            scope.callback(source.write, source.look()[1])
            source.write(state)


class DrawnFromTorch:
    """The same for torch's sources alone, restored without asking what moved."""

    __slots__ = ("_before",)

    def __init__(self, device_indices: Callable[[], Iterable[int]]):
        """Read the CPU's source and those of the CUDA devices named."""
        self._before = [(CPU, CPU.state())]
        if torch.cuda.is_initialized():
            generators = torch.cuda.default_generators
            for index in sorted(set(device_indices())):
                source = TorchSource(generators[index])
                self._before.append((source, source.state()))

    def finish(self) -> None:
        """Keep everything."""

    def enter(self, scope: Scope) -> None:
        """Put every source where the forward found it, until `scope` ends."""
        for source, state in self._before:
            scope.callback(source.write, source.state())
            source.write(state)
