"""Cases with functions of their own gradient, whose kernels the dispatcher may miss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.devices import array
from tests.replay.registry import operators
from tests.zoo import Call
from tests.zoo.case import leaf


class _SavesAll(Function):
    """`exp(x·y) · x`, which saves inputs, an intermediate, its output and `None`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = (x * y).exp()
        out = inner * x
        ctx.save_for_backward(x, y, inner, None, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, inner, _, out = ctx.saved_tensors
        return grad * (inner + out * y), grad * out * x


@operators()
def saves_inputs_outputs_and_intermediates() -> Call:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return _SavesAll.apply(x.sin(), y) * _SavesAll.apply(x, y.cos()).tanh()

    return Call(function, (leaf(5, 6), leaf(5, 6)))


class _SetsUp(Function):
    """The sine, with the newer way of saving."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return grad * cosine


@operators(not_double="its backward can be differentiated once")
def saves_in_a_context() -> Call:
    def function(x: Tensor) -> Tensor:
        sine, cosine = _SetsUp.apply(x * 2)
        return sine.exp() * cosine

    return Call(function, (leaf(5, 6),))


class _ReadTwice(Function):
    """A product that reads its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert torch.equal(ctx.saved_tensors[0], ctx.saved_tensors[0])
        return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]


@operators()
def saved_tensors_read_twice() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        return _ReadTwice.apply(y, x.cos()).exp() * _ReadTwice.apply(y, y)

    return Call(function, (leaf(5, 6),))


class _Scale(Function):
    """Multiply in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None


@operators()
def function_that_writes_its_input() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin() + 0
        before = (y + 1).exp()
        y = _Scale.apply(y, x.detach().cos())
        return before * y.tanh()

    return Call(function, (leaf(5, 6),))


class _Stash(Function):
    """The exponential, which keeps tensors as attributes and by `needs_input_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, power: int) -> Tensor:
        ctx.inner, ctx.power = x.exp(), power
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, factor)
        return ctx.inner * factor**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, factor = ctx.saved_tensors
        towards = None
        if x is not None:
            towards = grad * x.exp() * ctx.power * factor ** (ctx.power - 1)
        return grad * ctx.inner * factor**ctx.power, towards, None


@operators()
def tensors_kept_as_attributes() -> Call:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return _Stash.apply(x.sin(), y * 2, 2) * _Stash.apply(x.cos(), y.detach(), 3)

    return Call(function, (leaf(5, 6), leaf(5, 6)))


class Overwrites(Function):
    """Twice the input; the backward uses what it saved as scratch, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.copy_(grad).mul_(2)


class _View(Function):
    """Hand out a view of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(3, 10)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.reshape(5, 6)


@operators()
def function_that_returns_a_view() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        return _View.apply(y).exp().sum(0) * y.cos().sum()

    return Call(function, (leaf(5, 6),))


def squared_by_numpy(x: Tensor, into: Tensor) -> Tensor:
    """Fill `into` with the square of `x`, which no dispatcher sees."""
    np.square(array(x.detach()), out=array(into))
    return into


class _Filled(Function):
    """A square whose kernel fills memory that nobody has initialised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        squared = squared_by_numpy(x, torch.empty_like(x))
        scratch = squared_by_numpy(squared, x.new_empty(x.shape))
        ctx.save_for_backward(x, scratch)
        return squared

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, scratch = ctx.saved_tensors
        return grad * 2 * x + 0 * scratch


@operators()
def hidden_kernel_fills_empty_memory() -> Call:
    def function(x: Tensor) -> Tensor:
        y = _Filled.apply(x.sin())
        mask = torch.empty(5, 6)
        view = mask[1:]
        array(mask)[:] = array(x.detach()) > 0
        return y.exp() * (x * mask).cos() * (x[1:] * view).sum()

    return Call(function, (leaf(5, 6),))


class FilledZeros(Function):
    """A square whose kernel fills memory that the dispatcher saw filled with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        squared = squared_by_numpy(x, torch.zeros_like(x))
        ctx.save_for_backward(x)
        return squared

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


@operators(hidden="NumPy fills zeros")
def hidden_kernel_fills_zeros() -> Call:
    def function(x: Tensor) -> Tensor:
        return (FilledZeros.apply(x.sin()) + 1).exp().cos()

    return Call(function, (leaf(5, 6),))


@operators(hidden="NumPy writes a value that was read before")
def hidden_write_between_two_reads() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.detach().cos()
        before = (x * 1 + y).sin()
        array(y)[1:3] *= 2
        return before * (x * 1 - y).exp()

    return Call(function, (leaf(5, 6),))


@operators(
    hidden="NumPy writes what torch reads through `from_numpy`",
    cpu_only="NumPy shares memory with tensors of the CPU alone",
)
def array_reused_between_two_reads() -> Call:
    staging = np.ones((5, 6), dtype=np.float32)

    def function(x: Tensor) -> Tensor:
        shared = torch.from_numpy(staging)
        before = (x + shared).sin()
        staging[:] = 0.5
        return before * (x * 2 + shared).exp()

    return Call(function, (leaf(5, 6),))


@operators(hidden="a view of it is written through the memory")
def hidden_write_through_a_view() -> Call:
    def function(x: Tensor) -> Tensor:
        y = torch.zeros(5, 6)
        row = y[2]
        array(row)[:] = array(x.detach())[0]
        return (x + y).sin() * (x[0] - row).exp()

    return Call(function, (leaf(5, 6),))


@operators()
def storage_written_as_a_whole() -> Call:
    def function(x: Tensor) -> Tensor:
        y = torch.ones(5, 6)
        before = (x + y).sin()
        y.untyped_storage().copy_(x.detach().cos().untyped_storage())
        return before * (x + y).exp()

    return Call(function, (leaf(5, 6),))
