"""Every source of random numbers that a region may draw from.

Rerun must find each source where the forward found it, and leave it where it was. The
state is noted before every region, whether or not it draws: a function may also reseed,
so that a state that is the same afterwards proves nothing. Noting is cheap because a
mark (see `marks`) tells that the state noted last is still the state.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Generator

from membudget.scope import Scope
from membudget.state.marks import mark_of

Noted = list[tuple["Source", tuple[Any, Any]]]


class Source:
    """One source of random numbers, whose state can be noted and brought back.

    The last pair of mark and state is remembered: regions between which nothing is
    drawn share one state, and what did not move is not written.
    """

    __slots__ = ("_last", "_mark", "_read", "_write")

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        mark: Callable[[], Any] | None,
    ):
        """Watch a source.

        Args:
            read: Returns its state, by its public function.
            write: Puts a state back.
            mark: Returns something that is the same only while the state is;
                `None` if reading the state is all there is.
        """
        self._read = read
        self._write = write
        self._mark = mark if mark is not None else lambda: repr(read())
        self._last: tuple[Any, Any] | None = None

    def note(self) -> tuple[Any, Any]:
        """Return mark and state; the same pair if nothing was drawn since."""
        mark = self._mark()
        last = self._last
        if last is None or last[0] != mark:
            last = self._last = (mark, self._read())
        return last

    def bring_back(self, noted: tuple[Any, Any]) -> None:
        """Put the source where it was when it was noted."""
        if self._mark() != noted[0]:
            self._write(noted[1])


def note(sources: Iterable[Source]) -> Noted:
    """Return where each source stands now."""
    return [(source, source.note()) for source in sources]


def bring_back(noted: Noted, scope: Scope) -> None:
    """Put every source where it was when it was noted, until `scope` ends."""
    for source, state in noted:
        now = source.note()
        scope.append((source.bring_back, (now,)))
        if now is not state:
            source.bring_back(state)


def source_of(generator: Any) -> Source | None:
    """Return the source behind a generator of torch, Python or NumPy."""
    if generator is torch.default_generator:
        return _CPU[0]
    if isinstance(generator, Generator):
        return _torch_source(generator)
    if isinstance(generator, random.SystemRandom):
        return None  # It has no state.
    mark = mark_of(generator)
    if isinstance(generator, random.Random):
        return Source(generator.getstate, generator.setstate, mark)
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return Source(lambda: bits.state, partial(setattr, bits, "state"), None)
    return Source(partial(generator.get_state, legacy=False), generator.set_state, mark)


def _torch_source(generator: Generator) -> Source:
    """Return the source behind a `torch.Generator`, of whichever device.

    Its state is kept as bytes: no tensor of ours is alive when a step is at its peak.
    """

    def read() -> bytes:
        state = generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    def write(raw: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    return Source(read, write, mark_of(generator) or read)


def private_sources(generators: Iterable[Any], torch_too: bool) -> list[Source]:
    """Return the sources behind generator objects that a region can reach.

    Args:
        generators: Generators of torch, Python and NumPy.
        torch_too: Whether torch's generators are wanted.
    """
    sources = [
        source_of(generator)
        for generator in generators
        if generator is not torch.default_generator
        and (torch_too or not isinstance(generator, Generator))
    ]
    return [source for source in sources if source is not None]


def global_sources(torch_too: bool = True) -> tuple[Source, ...]:
    """Return the sources that any code can draw from without naming one.

    Python's `random`, NumPy's if NumPy was imported, the CPU's generator, and those of
    the CUDA devices if CUDA is in use.

    Args:
        torch_too: Whether torch's generators are wanted.
    """
    return _global_sources(
        torch_too,
        "numpy.random" in sys.modules,
        torch_too and _cuda_is_in_use(),
    )


def torch_sources(device_indices: Callable[[], Iterable[int]]) -> tuple[Source, ...]:
    """Return the sources that torch's own checkpoint brings back.

    Args:
        device_indices: Asked for the CUDA devices, if CUDA is in use.
    """
    if not _cuda_is_in_use():
        return _CPU
    return *_CPU, *map(_cuda_source, sorted(set(device_indices())))


_CPU = (_torch_source(torch.default_generator),)
_PYTHON = Source(random.getstate, random.setstate, mark_of(random._inst))


# A build without CUDA never begins to use it, and asking costs a microsecond's tenth.
_cuda_is_in_use = torch.cuda.is_initialized if torch.backends.cuda.is_built() else bool


@cache
def _cuda_source(index: int) -> Source:
    return _torch_source(torch.cuda.default_generators[index])


@cache
def _global_sources(torch_too: bool, numpy_too: bool, cuda: bool) -> tuple[Source, ...]:
    sources = [_PYTHON]
    if torch_too:
        sources += _CPU
    if numpy_too:
        numpy_random: Any = sys.modules["numpy.random"]
        source = source_of(numpy_random.get_state.__self__)
        sources += [source] if source is not None else []
    if cuda:
        sources += map(_cuda_source, range(len(torch.cuda.default_generators)))
    return tuple(sources)
