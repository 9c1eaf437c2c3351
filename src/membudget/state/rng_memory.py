"""Detect draws from a random generator by reading the memory that holds its state.

Reading a generator's state through public functions takes 1 µs (torch), 13 µs (Python)
or 42 µs (NumPy), while a whole region may take only 20 µs. Reading the raw bytes of a
generator's state is far cheaper (60 ns for torch's CPU generator), and if the bytes are
equal, the state has not changed. Raw bytes are only compared, never written back.

A generator's memory layout is an implementation detail, so each type of generator is
probed once per process, with draws that change every part of the state, including the
spare Gaussian that is cached outside the Mersenne Twister's words. If a
probe finds no state, or a draw leaves the bytes unchanged, generators of that type are
read through public functions.
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

RawPlace = tuple[Any, Any]
"""Of a part of a raw state: its address and size, or an object and its attribute."""


class RawReader(partial[Any]):
    """A function that reads a raw state: a tuple of its parts, or the only part.

    Attributes:
        places: Where each part lies, for who compares it without a copy.
    """

    places: tuple[RawPlace, ...]


def _reader(read: Reader, *places: RawPlace) -> Reader:
    reader = RawReader(read)
    reader.places = places
    return reader


_HEADER_BYTES = object.__basicsize__  # Skipped: the reference count changes freely.
_RAW = attrgetter("raw")  # Implemented in C: 60 ns a call.
_WORDS = 624  # Of a Mersenne twister.


def raw_state_reader(generator: Any) -> Reader | None:
    """Return a function that reads a generator's raw state; `None` if unavailable.

    Example:
        >>> generator = random.Random(0)
        >>> read = raw_state_reader(generator)
        >>> before = read()
        >>> before == read(), generator.random() > 0, before == read()
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
    """Return whether a generator's raw state changes with every draw, and only then."""
    try:
        generator, draws = _PROBES[kind](owner)
        read = kind(generator)
    except (LookupError, TypeError, AttributeError):
        return False
    before = read()
    for draw in draws:
        if read() != before:
            return False
        draw()
        if read() == before:
            return False
        before = read()
    return True


def _memory(address: int, size_bytes: int) -> Any:
    """Return a view of raw memory, which does not keep the memory's owner alive."""
    return (ctypes.c_char * size_bytes).from_address(address)


def _python_reader(generator: Any) -> Reader:
    place = id(generator) + _HEADER_BYTES, random.Random.__basicsize__ - _HEADER_BYTES
    memory = _memory(*place)
    # The spare Gaussian is a Python attribute, outside the C struct.
    return _reader(
        lambda: (memory.raw, generator.gauss_next), place, (generator, "gauss_next")
    )


def _python_probe(owner: Any) -> Any:
    generator = random.Random(0)
    gauss = generator.gauss
    return generator, (generator.random, lambda: gauss(0, 1), lambda: gauss(0, 1))


def _is_mersenne_twister(generator: Any) -> bool:
    bits = getattr(generator, "_bit_generator", None)
    return type(bits).__name__ == "MT19937"


def _numpy_reader(generator: Any) -> Reader:
    of_spare = (
        id(generator) + _HEADER_BYTES,
        type(generator).__basicsize__ - _HEADER_BYTES,
    )
    bits = generator._bit_generator
    # NumPy documents this struct: the 624 words, then the position.
    of_words = bits.ctypes.state_address, _WORDS * 4 + 4
    spare, words = _memory(*of_spare), _memory(*of_words)

    def read() -> Any:
        # `numpy.random.set_bit_generator` may have replaced the bit generator.
        if generator._bit_generator is not bits:
            return repr(generator.get_state(legacy=False))
        return bits, spare.raw, words.raw

    return _reader(read, (generator, "_bit_generator"), of_spare, of_words)


def _numpy_probe(owner: Any) -> Any:
    generator = owner(0)
    normal = generator.standard_normal
    return generator, (generator.random_sample, normal, normal)


def _torch_reader(generator: Any) -> Reader:
    start, size_bytes = _torch_engine()
    place = _torch_address(generator) + start, size_bytes
    return _reader(partial(_RAW, _memory(*place)), place)


def _torch_address(generator: Generator) -> int:
    """Return the address of the C++ generator, `torch.Generator`'s only field."""
    member = ctypes.c_void_p.from_address(id(generator) + _HEADER_BYTES)
    return int(member.value or 0)


@cache
def _torch_engine() -> tuple[int, int]:
    """Find the state in the C++ generator's memory by content; return offset and size.

    seed and position │ 624 words   │ two spare Gaussians, each with a flag
    24 bytes          │ 2,496 bytes │ 24 bytes
    """
    generator = Generator()
    public = bytes(generator.get_state().tolist())
    words = struct.unpack_from("<8Q", public, 24)
    # The public state stores each 32-bit word in 64 bits, the C++ object in 32.
    head = ctypes.string_at(_torch_address(generator), 256)
    start = head.index(struct.pack("<8I", *words)) - 24
    return start, 24 + _WORDS * 4 + 24


def _torch_probe(owner: Any) -> Any:
    generator = Generator()
    single = torch.empty(1, device="cpu")
    double = single.double()
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
