"""Cases that write through views and through other aliases of a storage."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.replay.registry import operators
from tests.zoo import Call
from tests.zoo.case import leaf


@operators()
def slices_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y[1:3].mul_(x[2:4])
        y[:, ::2].add_(x[:, 1::2]).sin_()
        y[-1, 2:5] = x[0, :3].exp()
        return (y.tanh() * y).cos()

    return Call(function, (leaf(5, 6),))


# Of the exponential or the sigmoid: in which order depends on the numbers of the nodes,
# which each thread counts for itself.
RUN_ALONE = (
    "plain, too, torch may run the node of a write alone, before it does the view's"
)


@operators(not_double_on_devices=RUN_ALONE)
def transposed_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y = y.clone()
        y.t()[1:3].mul_(x[:, 2])
        y.mT[0].exp_()
        cube = y.view(5, 2, 3).clone()
        cube.permute(2, 0, 1)[1].sin_()
        cube.movedim(0, -1).swapaxes(0, 1)[2].mul_(x[:, :2].T)
        return cube.exp() + y[:, 0, None, None]

    return Call(function, (leaf(5, 6),))


@operators(not_double_on_devices=RUN_ALONE)
def diagonals_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x @ x.T
        y.diagonal().add_(1.0)
        y.diagonal(1).mul_(x[:4, 0])
        y.diagonal(-2).sigmoid_()
        return y.exp().diagonal().cos() * torch.diag_embed(x[0, :5]).sin().sum(0)

    return Call(function, (leaf(5, 6),))


@operators()
def expanded_then_cloned_then_written() -> Call:
    def function(x: Tensor, row: Tensor) -> Tensor:
        y = row.sin().expand(5, 6).clone()
        y.mul_(x).exp_()
        z = row.expand_as(x).contiguous()
        z[1] = x[2]
        return (y * z).sin() + row.unsqueeze(0).repeat(1, 5, 1)[0].exp()

    return Call(function, (leaf(5, 6), leaf(1, 6)))


@operators()
def chunks_written_without_a_gradient() -> Call:
    def function(x: Tensor) -> Tensor:
        base = x.detach() * 2
        left, right = base.chunk(2, 1)
        left.mul_(right)
        for i, row in enumerate(base.unbind()):
            row.add_(i)
        first, _, third = base.split([1, 3, 2], dim=1)
        third.sub_(first)
        return (x * base).sin() * base.exp()

    return Call(function, (leaf(5, 6),))


@operators()
def parts_written_under_a_gradient() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.exp().clone()
        left, right = y.tensor_split(2, dim=1)
        left.mul_(x[:, 3:])
        right.sin_()
        parts = y.unsafe_split_with_sizes([2, 4], dim=1)
        return torch.cat([parts[0].tanh(), parts[1].cos() * y[:, :4]], 1)

    return Call(function, (leaf(5, 6),))


@operators()
def gates_of_one_product_written_in_turn() -> Call:
    def function(x: Tensor) -> Tensor:
        state = x[:, :2].tanh()
        for i in range(3):
            sums = x @ x[i].sin().outer(x[i])
            reset, update, new = sums.unsafe_chunk(3, 1)
            reset.add_(x[:, :2]).sigmoid_()
            update.add_(x[:, 2:4]).sigmoid_()
            new = (x[:, 4:] + new.mul_(reset)).tanh_()
            state = (state - new).mul_(update).add_(new)
        return state.sin()

    return Call(function, (leaf(5, 6),))


@operators()
def views_of_views_and_their_base_written() -> Call:
    def function(x: Tensor) -> list[Tensor]:
        base = x * 1
        flat = base.view(-1)
        inner = flat[3:21].view(3, 6)
        corner = inner.t()[1:4]
        base.mul_(2)
        corner.sin_()
        flat[::5].add_(x[0])
        return [corner.exp(), inner.cos().sum(0), base.tanh() * base, flat.clone()]

    return Call(function, (leaf(5, 6),))


@operators()
def two_aliases_written_in_turn() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.cos().clone()
        a, b = y[:3], y[2:]
        out = a.exp()
        for i in range(3):
            a.mul_(1.5)
            b[i].add_(x[i].sin())
            out = out + (a * 1).tanh() * y[2].clone()
        return out.sin() * b.exp()

    return Call(function, (leaf(5, 6),))


@operators()
def written_after_it_was_read() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin() + 0
        before = (y + 1).exp()
        y.mul_(3).add_(x)
        between = (y - 1).tanh()
        y[0] = 0.5
        return before * between * (y + 2).cos()

    return Call(function, (leaf(5, 6),))


@operators()
def metadata_changed_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin().t_()
        z = (x * y.T).unsqueeze_(0).transpose_(1, 2)
        flat = (z * 2).squeeze_(0).swapaxes_(0, 1)
        strided = x.detach().clone().as_strided_((5, 3), (6, 2), 1)
        return flat.exp() * y.T.cos() + (x[:, :3] * strided).sin().sum()

    return Call(function, (leaf(5, 6),))


@operators()
def strided_and_unfolded_windows() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        windows = y.as_strided((4, 5), (3, 1), 2)
        rolled = y.unfold(1, 3, 2) * y.unfold(0, 2, 3).sum()
        z = y.clone()
        z.as_strided((5,), (6,), 1).mul_(x[:, 0])
        return (windows.exp().sum(0) * rolled.sum(2)[:, :1]).cos() + z[:, :5].tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def reinterpreted_bits() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.detach() * 3
        bits = y.view(torch.int32)
        bits.bitwise_and_(-4096)
        halves = y.view(torch.int16)[:, ::2]
        halves.zero_()
        signs = (y.view(torch.int32) >> 31).float()
        return (x * y).sin() * (x + signs).exp()

    return Call(function, (leaf(5, 6),))


@operators()
def complex_parts_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.sin().view(5, 3, 2)).clone()
        z.imag.mul_(x[:, :3])
        z.real[1:].cos_()
        torch.view_as_real(z)[..., 0].add_(1.0)
        return (z * z.conj()).abs() + z.angle() * z.imag.cos()

    return Call(function, (leaf(5, 6),))


@operators()
def lazy_conjugates_written() -> Call:
    def function(x: Tensor, z: Tensor) -> list[Tensor]:
        y = z * 2
        mirrored = y.conj()
        mirrored.mul_(x[:, :3])
        mirrored.imag.add_(0.5)
        negative = y.conj().imag
        solved = mirrored.resolve_conj() * negative.resolve_neg()
        return [mirrored.exp(), negative.sin() * x[:, 3:], solved, y.T.conj()]

    return Call(function, (leaf(5, 6), leaf(5, 3, dtype=torch.complex64)))


@operators()
def lazy_negatives_read() -> Call:
    def function(z: Tensor) -> list[Tensor]:
        y = (z * 1j).conj()
        negative = y.imag
        assert negative.is_neg()
        assert y.is_conj()
        return [negative.exp() * y.real, (y @ y.mH).abs(), torch.mul(y, negative)]

    return Call(function, (leaf(5, 3, dtype=torch.complex64),))


@operators()
def detached_alias_written() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin() + 0
        y.detach().mul_(0.5)
        alias = y.detach()
        alias[0] += 1
        with torch.no_grad():
            y.clamp_(max=0.8)
        return (y * x).exp() * alias

    return Call(function, (leaf(5, 6),))


@operators()
def outputs_that_share_a_storage() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.exp() * 1
        y.view(-1)[7:9].sin_()
        return y, y[1:3], y.T.unsqueeze(0)

    return Call(function, (leaf(5, 6),), used=lambda outputs: outputs)


@operators(not_twice="it writes the outputs of one call")
def output_written_afterwards() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.cos() + 0
        part = y[1:]
        return y, (y + 1).sin(), (part * 2).exp()

    def used(outputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        outputs[0].mul_(3)
        return [outputs[0].exp(), outputs[1] * outputs[0], outputs[2]]

    return Call(function, (leaf(5, 6),), used=used)


@operators(not_again="a region that runs again refuses to write what it reads")
def strided_view_of_what_lay_outside() -> Call:
    # A copy of `wide` must have room for what is read between its rows.
    base = torch.randn(10, 6)
    wide = base[::2]

    def function(x: Tensor) -> Tensor:
        rows = wide.as_strided((5, 6), (12, 1), 0)
        between = wide[:, :3].as_strided((5, 2), (12, 1), 6)
        before = (x + rows).sin() * (x + between.sum(1, keepdim=True)).cos()
        base.mul_(2)
        return before * (x - rows).exp()

    return Call(function, (leaf(5, 6),), state={"base": base})
