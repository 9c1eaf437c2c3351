"""The random streams that a step may draw from.

Global ones are torch's default generators (of the CPU, and of each accelerator that is
in use), Python's `random` and NumPy's legacy generator if NumPy is imported. Private
ones are generators that a model or a batch holds as attributes; `walk` finds them.

A stream is read and put back by its public functions only. The engine reads the same
sources by quicker ways; an audit that shared them could not find them wrong.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True)
class Stream:
    """One random stream: how to read its state, and how to put one back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def global_streams() -> dict[str, Stream]:
    """Return the process-wide streams by name."""
    streams = {
        "torch CPU": Stream(torch.get_rng_state, torch.set_rng_state),
        "Python random": Stream(random.getstate, random.setstate),
    }
    # `numpy.random` is read only where somebody imported it: importing it here would
    # change the process that is audited.
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        streams["NumPy"] = Stream(numpy_random.get_state, numpy_random.set_state)
    streams.update(_device_streams())
    return streams


def _device_streams() -> Iterator[tuple[str, Stream]]:
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        if module is None or not module.is_available() or not module.is_initialized():
            continue
        for i in range(module.device_count()):
            yield (
                f"torch {kind}:{i}",
                Stream(
                    partial(module.get_rng_state, i),
                    partial(module.set_rng_state, device=i),
                ),
            )


def private_stream(value: object) -> Stream | None:
    """Return the stream that `value` is; `None` if it is none.

    A source without a state, such as `random.SystemRandom`, is no stream: nothing can
    make it draw the same numbers again.
    """
    if isinstance(value, torch.Generator):
        return Stream(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        if isinstance(value, random.SystemRandom):
            return None
        return Stream(value.getstate, value.setstate)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.RandomState):
        generator: Any = value
        return Stream(generator.get_state, generator.set_state)
    if isinstance(value, numpy_random.Generator):
        return _bit_generator(value.bit_generator)
    if isinstance(value, numpy_random.BitGenerator):
        return _bit_generator(value)
    return None


def _bit_generator(bits: Any) -> Stream:
    return Stream(lambda: bits.state, partial(setattr, bits, "state"))


def frozen(state: Any) -> Any:
    """Return a stream's state as tuples and bytes, which `==` compares to the bit."""
    if isinstance(state, torch.Tensor):
        return bytes(state.flatten().tolist())
    if isinstance(state, Mapping):
        return tuple((key, frozen(state[key])) for key in sorted(state))
    if isinstance(state, tuple | list):
        return tuple(frozen(item) for item in state)
    tobytes: Callable[[], bytes] | None = getattr(state, "tobytes", None)
    return state if tobytes is None else tobytes()
