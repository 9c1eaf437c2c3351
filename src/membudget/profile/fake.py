"""Run a step on fake tensors, which have shapes but no memory.

Floating-point tensors are fake: parameters, activations, gradients. Tensors computed
only from integers and booleans (token ids, positions, masks) are real, because models
branch on their values. So are single random numbers, by which models skip layers; see
`draws`. Parameters may be fake already; parameters on `meta` are replaced by fake CPU
tensors while the step runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from membudget._torch import (
    DispatchMode,
    fake_errors,
    is_fake,
    new_fake_mode,
    tree_map_only,
    without_fake_mode,
    written_arguments,
)
from membudget.callsite import user_line
from membudget.errors import OptionError
from membudget.ops import facts_of, flat_arguments
from membudget.state.bits import plain_parts

MOST_REAL_BYTES = 1 << 26
"""Larger integer tensors are fake too."""


@contextmanager
def fake_tensors(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Enter the fake mode of the first fake tensor in `tensors`, or a new fake mode."""
    parts = chain.from_iterable(map(plain_parts, tensors))
    fakes: Iterator[Any] = filter(is_fake, parts)
    mode = next((fake.fake_mode for fake in fakes), None) or new_fake_mode()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    integers = _IntegersForReal()
    try:
        with mode, integers:
            yield
    finally:
        mode.allow_non_fake_inputs = before
        integers.put_back()


@contextmanager
def explaining_fakes() -> Iterator[None]:
    """Re-raise errors about missing tensor values with the line of the user's code."""
    try:
        yield
    except fake_errors() as error:
        line = user_line(error)
        raise OptionError(
            f"{line} asks a fake tensor for what only real ones have ({error}). "
            "Profile with fake=False, or keep such code out of the step"
        ) from error


class _IntegersForReal(DispatchMode):
    """Runs an operator on real memory if all its tensors are integers, or one draw."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def put_back(self) -> None:
        """Restore real tensors that the step overwrote, such as a batch counter."""
        with torch.no_grad():
            for tensor, content in self._written.values():
                tensor.copy_(content)
        self._written.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        # Higher-order operators have no facts, and queries compute no tensors.
        if facts is None or facts.is_query:
            return func(*args, **kwargs)
        if _draws_one(func, args):
            with without_fake_mode():
                return _marked(func(*args, **kwargs))
        # With a fake operand, an operator writes to the fake twin of a real one.
        if func._schema.is_mutable and not _has_fakes(args, kwargs):
            self._note_written(written_arguments(func, args, kwargs))
        if _is_of_integers(func, args, kwargs):
            with without_fake_mode():
                return _marked(func(*args, **kwargs))
        return func(*args, **kwargs)

    def _note_written(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            is_real = not (is_fake(tensor) or tensor.is_meta)
            if is_real and id(tensor) not in self._written:
                with without_fake_mode(), torch.no_grad():
                    self._written[id(tensor)] = (tensor, tensor.detach().clone())


def _has_fakes(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(map(is_fake, flat_arguments(args, kwargs)))


def _draws_one(func: Any, args: Any) -> bool:
    """Return whether an operator makes one random number between 0 and 1."""
    rand = torch.ops.aten.rand
    return func in (rand.default, rand.generator) and math.prod(args[0]) == 1


def _marked(result: Any) -> Any:
    """Mark a single number on real memory, so that what is made of it is real, too."""
    if isinstance(result, Tensor) and result.is_floating_point():
        result._membudget_is_real = True  # type: ignore[attr-defined]
    return result


def _is_of_integers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    tensors = [t for t in flat_arguments(args, kwargs) if isinstance(t, Tensor)]
    if tensors:
        return all(map(_is_real_integer, tensors))
    return _makes_integers(func, args, kwargs)


def _is_real_integer(tensor: Tensor) -> bool:
    if is_fake(tensor):
        return False
    if hasattr(tensor, "_membudget_is_real"):
        return True
    return type(tensor) is Tensor and not tensor.is_meta and _is_small_integer(tensor)


def _is_small_integer(tensor: Tensor) -> bool:
    return (
        not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.nbytes <= MOST_REAL_BYTES
    )


def _makes_integers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a factory creates a small integer tensor on a real device."""
    is_factory = any(argument.name == "device" for argument in func._schema.arguments)
    if not is_factory or torch.device(kwargs.get("device") or "cpu").type == "meta":
        return False
    # A dry run on `meta` shows the result's size and dtype, and allocates nothing.
    with without_fake_mode():
        made = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
    return isinstance(made, Tensor) and _is_small_integer(made)


class AnyNumber(DispatchMode):
    """Makes `item()` return an arbitrary number, which no shape may depend on."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, except `item()`, which returns 0.5."""
        if str(func) == "aten._local_scalar_dense.default":
            return 0.5  # With 1, NAdam would divide by zero.
        return func(*args, **(kwargs or {}))


@contextmanager
def without_meta(model: Module, batch: Any) -> Iterator[Any]:
    """Replace `meta` tensors with fake CPU tensors; yield the converted batch."""
    # To be entered inside `fake_tensors`, whose mode makes the twins fake.
    twins: dict[int, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in twins:  # Tied parameters stay tied.
            twins[id(tensor)] = twin(tensor)
        return twins[id(tensor)]

    with ExitStack() as stack:
        for module in model.modules():
            tables: tuple[Any, ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        table[name] = replaced(tensor)
                        stack.callback(table.__setitem__, name, tensor)
        yield tree_map_only(Tensor, replaced, batch)


def twin(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor like `tensor`, or a fake one in fake mode.

    The twin of a tensor on `meta` is on the CPU. The twin of a `DTensor` is like the
    local tensor, which is all that a rank holds.
    """
    parts = tuple(plain_parts(tensor))
    like = parts[0] if len(parts) == 1 else tensor
    device = "cpu" if like.is_meta else like.device
    made = torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=device
    )
    if isinstance(tensor, Parameter):
        return Parameter(made, requires_grad=tensor.requires_grad)
    return made


def without_memory(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `make` so that it creates its tensors on the meta device.

    Raises:
        OptionError: When the wrapper is called, if `make` reads values of tensors.
    """

    @wraps(make)
    def made(**sizes: Any) -> Any:
        try:
            with torch.device("meta"):
                return make(**sizes)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise OptionError(
                "--fake makes the model on the meta device, where tensors have no "
                f"values, and the function reads some ({error}). Give those tensors "
                "device='cpu', or leave --fake out"
            ) from error

    return made
