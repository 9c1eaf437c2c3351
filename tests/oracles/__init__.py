"""The step that decides: what a call computes and leaves behind, bit for bit.

`run_step` builds a case anew, runs its forward in a way that the caller gives, draws
random numbers, as any step does in between, then runs loss and backward, and takes down
everything that a step may change. Two results are the same when each bit is: NaN equals
itself, and zero is not minus zero.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from tests.devices import default_generators
from tests.zoo import Call, Case

# Runs the call of a case, in a region or in several, and returns its outputs.
Way = Callable[[Call], Any]

# Sends the loss backward, once or more often, to the leaves.
Backward = Callable[[Tensor, list[Tensor]], None]

Facts = dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """What one step computed and left behind.

    Attributes:
        loss: The loss.
        outputs: Every tensor and value of the output, by its place.
        gradients: The gradient of every leaf, `None` where there is none.
        values: What every parameter, buffer, argument and named state is afterwards.
        streams: The state of every random stream, global and private.
    """

    loss: Tensor
    outputs: Facts
    gradients: Facts
    values: Facts
    streams: Facts


def plain(call: Call) -> Any:
    """Run the call without any region, even where its code asks for one."""
    with mb.disable_checkpointing():
        return call.function(*call.args, **call.kwargs)


def backward_once(loss: Tensor, leaves: list[Tensor]) -> None:
    """Send the loss backward."""
    loss.backward()


def backward_twice(loss: Tensor, leaves: list[Tensor]) -> None:
    """Send the loss backward through the same graph twice."""
    loss.backward(retain_graph=True)
    loss.backward()


def double_backward(loss: Tensor, leaves: list[Tensor]) -> None:
    """Send a function of the loss's gradients backward."""
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    penalty = scalar([g for g in gradients if g is not None])
    if penalty.requires_grad:
        penalty.backward()


def run_step(case: Case, way: Way, backward: Backward = backward_once) -> StepResult:
    """Build `case`, run one step of it and return what it computed and left.

    Args:
        case: The case.
        way: How its call is run.
        backward: What is done with the loss.
    """
    call = case.build()
    with call.around():
        outputs = way(call)
    loss = scalar(call.used(outputs))
    held = {"function": call.function, "args": call.args, "kwargs": call.kwargs}
    held |= call.state
    _draw_from_every_stream(held)
    found = dict(tensors_in(held))
    leaves = {id(t): t for t in found.values() if t.requires_grad and t.is_leaf}
    backward(loss, list(leaves.values()))
    values = dict(facts_in(held))
    return StepResult(
        loss=loss.detach(),
        outputs=dict(facts_in(outputs)),
        gradients={n: t.grad for n, t in found.items() if id(t) in leaves},
        values={n: v for n, v in values.items() if not _is_stream(v)},
        streams=_global_streams()
        | {n: _stream_state(v) for n, v in values.items() if _is_stream(v)},
    )


def _draw_from_every_stream(held: Any) -> None:
    """Move every stream on, so that a recompute does not find it in place by luck."""
    for generator in default_generators():
        torch.rand((), generator=generator, device=generator.device)
    random.random()
    np.random.random()  # noqa: NPY002
    for _, stream in _walk(held, ""):
        if isinstance(stream, Generator):
            torch.rand((), generator=stream, device=stream.device)
        elif _is_stream(stream):
            stream.random()


def scalar(outputs: Any) -> Tensor:
    """Return a loss that weighs each element of each floating tensor differently."""
    total = torch.zeros((), dtype=torch.float64)
    for _, tensor in tensors_in(outputs):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_floating_point():
            is_strided = tensor.layout is torch.strided
            dense = tensor if is_strided else tensor.to_dense()
            n, place = dense.numel(), dense.device
            weights = torch.arange(1, n + 1, dtype=torch.float64, device=place).cos()
            total = total + (dense.double().reshape(-1).sin() * weights).sum()
    return total


def differences(a: StepResult, b: StepResult) -> list[str]:
    """Name everything in which two steps differ, as `"gradients args[0]"`."""
    found: list[str] = []
    for field in dataclasses.fields(StepResult):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(one, Tensor):
            one, other = {"": one}, {"": other}
        for name in sorted(one.keys() | other.keys()):
            if name not in one or name not in other:
                found.append(f"{field.name} {name} (only one has it)".strip())
            elif not same_bits(one[name], other[name]):
                found.append(f"{field.name} {name}".strip())
    return found


def assert_same_step(a: StepResult, b: StepResult) -> None:
    """Raise an `AssertionError` that names what differs between two steps."""
    found = differences(a, b)
    assert not found, f"not the same to the last bit: {', '.join(found)}"


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two facts are the same, tensors to the last bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return False
        if a.layout is not torch.strided:
            return all(map(same_bits, _parts(a), _parts(b)))
        return torch.equal(_bits(a), _bits(b))
    return type(a) is type(b) and bool(a == b)


def _parts(sparse: Tensor) -> tuple[Tensor, ...]:
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return (sparse.to_dense(),)


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Not `contiguous`: it keeps the stride of a dimension of one element.
    whole = plain.clone(memory_format=torch.contiguous_format)
    return whole.reshape(-1).view(torch.uint8)


class CountedOperators(TorchDispatchMode):
    """Count the operators that run, by name.

    `detach` and `alias` compute nothing: they make another Python object of a tensor.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operator and run it."""
        name = func.overloadpacket.__name__
        if name not in ("detach", "alias"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def tensors_in(thing: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in `thing`, by its place."""
    for place, fact in _walk(thing, name):
        if isinstance(fact, Tensor):
            yield place, fact


def facts_in(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield a copy of every tensor and every other value in `thing`, by its place."""
    for place, fact in _walk(thing, ""):
        if isinstance(fact, Tensor):
            yield f"{place} requires_grad", fact.requires_grad
            fact = fact.detach().clone()
        yield place, fact


def _walk(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Module):
        for key, tensor in (*thing.named_parameters(), *thing.named_buffers()):
            yield f"{name}.{key}", tensor
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _walk(value, f"{name}.{key}")
    elif isinstance(thing, list | tuple):
        yield f"{name} type", type(thing).__name__
        for i, value in enumerate(thing):
            yield from _walk(value, f"{name}[{i}]")
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield f"{name} type", type(thing).__name__
        fields = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
        yield from _walk(fields, name)
    elif callable(thing):
        # In a case's state, a function says what it reads; the call itself is none.
        if name != ".function":
            yield from _walk(thing(), name)
    else:
        yield name, thing


def _is_stream(value: Any) -> bool:
    return isinstance(value, Generator | random.Random | np.random.Generator)


def _stream_state(stream: Any) -> Any:
    if isinstance(stream, Generator):
        return stream.get_state()
    if isinstance(stream, random.Random):
        return stream.getstate()
    return repr(stream.bit_generator.state)


def _global_streams() -> Facts:
    # Not `repr` of all of it: writing 624 numbers out takes a millisecond.
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    words = numpy["state"].pop("key").tobytes()
    return {
        **{f"torch {g.device}": g.get_state() for g in default_generators()},
        "python": random.getstate(),
        "numpy": (words, repr(numpy)),
    }
