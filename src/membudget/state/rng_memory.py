"""Cheap marks of random generators: raw looks at their memory.

To know whether a generator has drawn, its public state would do, but reading that costs
1 µs (torch), 13 µs (Python) and 42 µs (NumPy), where a whole region may take 20. So a
*mark*, the bytes in which the generator keeps its state, stands for it: while the mark
is the same, so is the state. Marks are compared and never written back.

Where a generator keeps its state is no promise of anybody's. So each kind is tried once
a process, with every way of drawing that leaves a trace of its own (the second of two
Gaussians comes from a spare, beside the words of the twister); where a mark does not
move with each draw, or where the state is not found, there are no marks of that kind.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Generator

Reader = Callable[[], Any]

_HEADER_BYTES = object.__basicsize__  # The reference count moves and says nothing.
_RAW = attrgetter("raw")  # In C, so that a mark takes 60 ns.
_WORDS = 624  # Of a Mersenne twister.


def raw_state_reader(generator: Any) -> Reader | None:
    """Return a function that reads the mark of a generator, for as long as that lives.

    Args:
        generator: A generator of torch (on the CPU), Python, or NumPy's legacy kind.

    Returns:
        The function; `None` where there are no marks of that kind.

    Example:
        >>> generator = random.Random(0)
        >>> mark = raw_state_reader(generator)
        >>> before = mark()
        >>> before == mark(), generator.random() > 0, before == mark()
        (True, True, False)
    """
    kind = _reader_for(generator)
    owner: Any = type(generator)
    if kind is None or not _is_reliable(kind, owner):
        return None
    return kind(generator)


def _reader_for(generator: Any) -> Callable[[Any], Reader] | None:
    if sys.implementation.name != "cpython":
        return None
    if isinstance(generator, Generator):
        return _torch_reader if generator.device.type == "cpu" else None
    if isinstance(generator, random.Random):
        return _python_reader
    return _numpy_reader if _is_mersenne_twister(generator) else None


@cache
def _is_reliable(kind: Callable[[Any], Reader], owner: Any) -> bool:
    """Tell whether a mark of this kind moves with every draw, and not without one."""
    try:
        generator, draws = _PROBES[kind](owner)
        mark = kind(generator)
    except (LookupError, TypeError, AttributeError):
        return False
    before = mark()
    for draw in draws:
        if mark() != before:
            return False
        draw()
        if mark() == before:
            return False
        before = mark()
    return True


def _memory(address: int, size_bytes: int) -> Any:
    """Return a view, which does not keep alive what it shows."""
    return (ctypes.c_char * size_bytes).from_address(address)


def _python_reader(generator: Any) -> Reader:
    size_bytes = random.Random.__basicsize__ - _HEADER_BYTES
    memory = _memory(id(generator) + _HEADER_BYTES, size_bytes)
    return lambda: (memory.raw, generator.gauss_next)


def _python_probe(owner: Any) -> Any:
    generator = random.Random(0)
    gauss = generator.gauss
    return generator, (generator.random, lambda: gauss(0, 1), lambda: gauss(0, 1))


def _is_mersenne_twister(generator: Any) -> bool:
    bits = getattr(generator, "_bit_generator", None)
    return type(bits).__name__ == "MT19937"


def _numpy_reader(generator: Any) -> Reader:
    size_bytes = type(generator).__basicsize__ - _HEADER_BYTES
    spare = _memory(id(generator) + _HEADER_BYTES, size_bytes)
    bits = generator._bit_generator
    # NumPy documents this structure: the words, and the position.
    words = _memory(bits.ctypes.state_address, _WORDS * 4 + 4)

    def mark() -> Any:
        # `numpy.random.set_bit_generator` may have exchanged the twister.
        if generator._bit_generator is not bits:
            return repr(generator.get_state(legacy=False))
        return spare.raw, words.raw

    return mark


def _numpy_probe(owner: Any) -> Any:
    generator = owner(0)
    normal = generator.standard_normal
    return generator, (generator.random_sample, normal, normal)


def _torch_reader(generator: Any) -> Reader:
    start, size_bytes = _torch_engine()
    memory = _memory(_torch_address(generator) + start, size_bytes)
    return partial(_RAW, memory)


def _torch_address(generator: Generator) -> int:
    """Return the address of the C++ object, the one member of the Python object."""
    member = ctypes.c_void_p.from_address(id(generator) + _HEADER_BYTES)
    return int(member.value or 0)


@cache
def _torch_engine() -> tuple[int, int]:
    """Find the words of the twister in the C++ object, by what they must be.

    Before them stand seed and position, after them the spare Gaussians, one of single
    and one of double precision, each with a flag.
    """
    generator = Generator()
    public = bytes(generator.get_state().tolist())
    words = struct.unpack_from("<8Q", public, 24)
    head = ctypes.string_at(_torch_address(generator), 256)
    start = head.index(struct.pack("<8I", *words)) - 24
    return start, 24 + _WORDS * 4 + 24


def _torch_probe(owner: Any) -> Any:
    generator = Generator()
    single, double = torch.empty(1), torch.empty(1, dtype=torch.float64)
    return generator, (
        lambda: single.uniform_(generator=generator),
        lambda: single.normal_(generator=generator),
        lambda: single.normal_(generator=generator),
        lambda: double.normal_(generator=generator),
        lambda: double.normal_(generator=generator),
        lambda: generator.manual_seed(1),
    )


_PROBES: dict[Any, Callable[[Any], Any]] = {
    _python_reader: _python_probe,
    _numpy_reader: _numpy_probe,
    _torch_reader: _torch_probe,
}
