"""Cases on operators that sort, factor, transform, or have types of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.replay.registry import operators
from tests.zoo import Call
from tests.zoo.case import leaf


@operators()
def fourier_transforms() -> Call:
    def function(x: Tensor, kernel: Tensor) -> list[Tensor]:
        spectrum = torch.fft.rfft(x) * kernel
        again = torch.fft.irfft(spectrum * spectrum.conj(), n=6)
        plane = torch.fft.fft2(torch.complex(again, x.sin()))
        shifted = torch.fft.fftshift(plane).conj().resolve_conj()
        return [
            torch.view_as_real(shifted).tanh(),
            torch.fft.ifft(plane.mT).add(9).abs(),
        ]

    return Call(function, (leaf(5, 6), leaf(4, dtype=torch.complex64)))


@operators()
def short_time_fourier_transform() -> Call:
    window = torch.hann_window(8)

    def function(x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 8, 4, window=window, return_complex=True)
        gain = spectrum.abs().add(0.1).log()
        return torch.istft(spectrum * gain, 8, 4, window=window).sin()

    return Call(function, (leaf(2, 32),))


@operators()
def complex_arithmetic() -> Call:
    def function(x: Tensor) -> list[Tensor]:
        z = torch.polar(x.exp(), x)
        y = torch.complex(x.sin(), x.cos()) @ z.mH
        return [y.real.tanh(), z.angle(), y.imag * 2, (y * y.conj() / 9).cos(), z.sgn()]

    return Call(function, (leaf(5, 6),))


@operators(cpu_only="emu has no sparse tensors")
def sparse_matrices() -> Call:
    places = torch.tensor([[0, 1, 2, 2], [1, 0, 2, 4]])

    def function(x: Tensor, values: Tensor) -> list[Tensor]:
        matrix = torch.sparse_coo_tensor(
            places, values.exp(), (5, 5), check_invariants=True
        )
        product = torch.sparse.mm(matrix, x.sin())
        dense = matrix.to_dense() @ x
        return [product.cos(), dense.tanh(), torch.sparse.sum(matrix * 2, 0).to_dense()]

    return Call(function, (leaf(5, 6), leaf(4)))


@operators(cpu_only="emu has no sparse tensors")
def sparse_without_a_gradient() -> Call:
    def function(x: Tensor) -> Tensor:
        chosen = (x.detach() > 0.3).float()
        coordinates = chosen.to_sparse().coalesce()
        rows = coordinates.indices()[0]
        weights = torch.sparse.mm(coordinates, x.sin().T)
        return weights.exp() * torch.bincount(rows, minlength=5) + chosen.sum()

    return Call(function, (leaf(5, 6),))


@operators()
def shapes_that_depend_on_data() -> Call:
    def function(x: Tensor) -> list[Tensor]:
        positive = x.masked_select(x > 0).exp()
        rows = x[x.detach().sum(1) > 0].sin()
        places = x.detach().abs().gt(0.5).nonzero()
        order, inverse, counts = torch.unique(
            x.detach().round(), return_inverse=True, return_counts=True
        )
        return [
            positive,
            rows,
            (x[places[:, 0], places[:, 1]] * 2).cos(),
            (order[inverse] * x).tanh(),
            x[: len(counts)].repeat_interleave(counts[:5] % 3, 0).exp(),
        ]

    return Call(function, (leaf(5, 6),))


@operators()
def orders_and_extremes() -> Call:
    def function(x: Tensor) -> list[Tensor]:
        values, places = x.sin().sort(stable=True, dim=1, descending=True)
        largest, where = x.exp().cummax(0)
        smallest = x.cos().cummin(1).values
        middle, _ = x.median(1)
        third = x.tanh().kthvalue(3, dim=1).values
        often = x.round().mode(1).values * x[:, 0]
        return [
            values * places,
            largest * where,
            smallest.exp(),
            middle.sin(),
            third * middle,
            often,
            torch.msort(x).cos(),
            x.argsort(1) * x,
            x.amax(0).exp(),
            x.aminmax(dim=1).max.sin(),
            x.nanmedian().exp(),
            x.max().cos(),
        ]

    return Call(function, (leaf(5, 6),))


@operators()
def searches_and_histograms() -> Call:
    def function(x: Tensor) -> Tensor:
        edges = torch.linspace(-2, 2, 7)
        bins = torch.bucketize(x.detach(), edges)
        ranks = torch.searchsorted(x.detach().sort(1).values, x.detach())
        density = torch.histc(x.detach(), 6, -2, 2)
        runs = torch.unique_consecutive(bins.flatten()).numel()
        return (x * bins).sin() * (x + ranks).cos() * density * runs

    return Call(function, (leaf(5, 6),))


@operators()
def joined_and_split() -> Call:
    def function(x: Tensor) -> list[Tensor]:
        a, b, c = torch.cat([x, x.sin()], 1).split(4, dim=1)
        d, *_ = torch.stack([a, b, c]).exp().unbind(1)
        e = torch.block_diag(d, a.tanh()).roll(2, 1).flip(0)
        f, g = torch.meshgrid(x[0].cos(), x[:, 0], indexing="ij")
        return [
            e.cumsum(0),
            a * b,
            c.logcumsumexp(1),
            (f * g).tril(),
            x.tile(2).exp(),
            x.cumprod(1),
            x.diff().sin(),
            x.rot90() * 2,
            x.take(torch.tensor([3, 7])),
        ]

    return Call(function, (leaf(5, 6),))


@operators()
def products_of_every_kind() -> Call:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        z = torch.einsum("ij,jk,lk->il", x, y, x.sin())
        w = torch.baddbmm(
            z.expand(2, 5, 5), x.view(1, 5, 6).repeat(2, 1, 1), x.T.expand(2, 6, 5)
        )
        return [
            z.exp(),
            w.tanh(),
            torch.kron(x, y[:2, :2]).sin(),
            torch.trace(x @ y),
            torch.tensordot(x, y, 1),
            torch.addmv(x[:, 0], x, y[0]).cos(),
            torch.linalg.multi_dot([x, y, y.T]),
            torch.outer(x[0], y[0]).exp(),
        ]

    return Call(function, (leaf(5, 6), leaf(6, 6)))


@operators()
def decompositions() -> Call:
    def function(x: Tensor) -> list[Tensor]:
        square = x.T @ x + 4 * torch.eye(5)
        lower = torch.linalg.cholesky(square)
        q, r = torch.linalg.qr(x.sin())
        values, vectors = torch.linalg.eigh(square)
        return [
            lower.exp(),
            q @ r,
            values.log(),
            vectors.abs(),
            square.logdet(),
            torch.linalg.solve(square, x.T),
            torch.linalg.svdvals(x),
            torch.linalg.inv(square).cos(),
            torch.linalg.det(r),
        ]

    return Call(function, (leaf(6, 5),))


@operators(
    not_double="torch has no second derivative of the CTC loss",
    not_again="a rerun around compares what the CTC loss leaves unfilled",
)
def losses() -> Call:
    def function(x: Tensor, labels: Tensor) -> list[Tensor]:
        ctc = F.ctc_loss(
            x.log_softmax(-1).view(5, 1, 6).expand(5, 2, 6),
            labels[:4].view(2, 2) + 1,
            torch.tensor([5, 5]),
            torch.tensor([2, 1]),
        )
        return [
            F.cross_entropy(x.sin(), labels, label_smoothing=0.1),
            ctc,
            F.huber_loss(x, x.detach().roll(1)),
            F.nll_loss(x.log_softmax(1), labels),
            F.binary_cross_entropy_with_logits(x, (x.detach() > 0).float()),
            F.multi_margin_loss(x, labels),
            F.kl_div(x, x.detach().softmax(1), reduction="batchmean"),
            F.smooth_l1_loss(x.exp(), x.detach()),
        ]

    return Call(function, (leaf(5, 6), torch.tensor([0, 3, 1, 4, 2])))


@operators()
def fake_quantisation() -> Call:
    def function(x: Tensor) -> Tensor:
        y = torch.fake_quantize_per_tensor_affine(x.sin(), 0.1, 0, -8, 7)
        scale, zero = torch.tensor([0.05]), torch.zeros(1, dtype=torch.int32)
        z = torch.fake_quantize_per_channel_affine(
            x, scale.expand(5).contiguous(), zero.expand(5).contiguous(), 0, -8, 7
        )
        return (y * z).exp() * (x * (x.detach() * 9).to(torch.int8).float()).cos()

    return Call(function, (leaf(5, 6),))


@operators(
    not_double="torch has no second derivative of MKL-DNN tensors",
    cpu_only="MKL-DNN is of the CPU",
)
def opaque_layout() -> Call:
    # Tensors of this layout have no storage.
    def function(x: Tensor) -> Tensor:
        y = x.sin().to_mkldnn()
        z = F.relu(y).to_dense()
        return z.exp() * y.to_dense()

    return Call(function, (leaf(5, 6),))


@operators(
    not_again="a region that runs again refuses to write what it reads",
    cpu_only="emu has no sparse tensors",
)
def sparse_values_in_place() -> Call:
    # A sparse tensor has no storage of its own, but its values do.
    buffer = torch.eye(5, 6).to_sparse().coalesce()

    def function(x: Tensor) -> Tensor:
        chosen = (x.detach() > 0).float().to_sparse()
        before = (x + buffer.to_dense()).sin()
        chosen._values().mul_(3)
        buffer.mul_(2)
        total = torch.sparse.mm(chosen, x.sin().T).exp()
        return before * total.sum() * (x - buffer.to_dense()).cos()

    return Call(function, (leaf(5, 6),), state={"buffer": buffer})


@operators()
def promoted_types() -> Call:
    def function(x: Tensor, n: Tensor) -> list[Tensor]:
        half, wide = torch.tensor(0.5, dtype=torch.float64), torch.tensor(3)
        y = (x * half).sin() * wide + n
        z = torch.where(n > 1, 1.0, x) ** 2 + 2**x
        return [
            y.exp(),
            z,
            (x.double() * n).cos(),
            torch.mul(n, x.half()).float().sin(),
            torch.add(n, x, alpha=2).exp(),
            (n / 2 * x).tanh(),
            torch.pow(x, half),
            torch.clamp(x, min=half, max=wide).sin(),
            x.to(torch.bfloat16).exp().float(),
        ]

    x = torch.rand(5, 6).requires_grad_()
    return Call(function, (x, torch.randint(4, (6,))))


@operators()
def integers_and_booleans() -> Call:
    def function(x: Tensor) -> Tensor:
        n = (x.detach() * 4).long()
        odd = (n % 2 == 1) ^ (n > 2)
        shifted = (n << 1).bitwise_or(1).gcd(torch.tensor(6))
        one_hot = F.one_hot(n.clamp(0, 5)[:, 0], 6)
        return (x * shifted).sin() * odd + (x * one_hot).exp().masked_fill(odd, 0.5)

    return Call(function, (leaf(5, 6),))


@operators()
def tensors_of_no_elements_and_of_no_dimensions() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> list[Tensor]:
        nobody = linear(x[:0]).tanh()
        nobody = nobody.clone().mul_(2)
        total = x.sum().sin()
        total.add_(x.mean()).sub_(1.5)
        empty = torch.zeros(0, 6).copy_(nobody)
        last = torch.stack([total, x[0, 0].exp()]).prod()
        return [
            torch.cat([nobody, empty, (x * total).cos()]),
            last.exp(),
            x.new_zeros(()).add_(last).tanh(),
            x[5:].sum().exp(),
        ]

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@operators()
def inputs_that_are_not_contiguous() -> Call:
    base, wide = leaf(6, 5), leaf(10, 6)

    def function(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        y = a.sin() * b.exp() + c.reshape(1, 6)
        return [
            y.view_as(y).cos(),
            (a @ b.T).flatten()[1::2].tanh(),
            a.T.reshape(-1).exp(),
        ]

    state = {"base": base, "wide": wide}
    return Call(function, (base.T, wide[1::2], base[:, 2].expand(1, 6)), state=state)
