"""Cases made of torch's own layers and of operators with kernels of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Call, case, leaf


@case(not_reentrant="the output is a tuple with a tuple in it")
def lstm() -> Call:
    return Call(nn.LSTM(6, 4, num_layers=2, dropout=0.3), (leaf(5, 2, 6),))


@case()
def gru() -> Call:
    return Call(nn.GRU(6, 4, bidirectional=True), (leaf(5, 2, 6),))


@case()
def attention_with_dropout() -> Call:
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def function(x: Tensor) -> Tensor:
        return attention(x, x, x, need_weights=False)[0]

    return Call(function, (leaf(2, 5, 8),), state={"attention": attention})


@case(not_double="torch has no second derivative of the flash kernel")
def scaled_dot_product_attention() -> Call:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Call(function, tuple(leaf(2, 2, 5, 4) for _ in range(3)))


@case()
def scaled_dot_product_attention_with_mask() -> Call:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)
        return out.sin()

    mask = torch.ones(5, 5).tril().bool()
    return Call(function, (*(leaf(2, 2, 5, 4) for _ in range(3)), mask))


@case()
def transformer_layer() -> Call:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return Call(model, (leaf(2, 5, 8),))


@case()
def complex_numbers_and_fft() -> Call:
    def function(x: Tensor, kernel: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * kernel
        return torch.fft.irfft(spectrum * spectrum.conj(), n=6) + spectrum.abs().sum()

    return Call(function, (leaf(5, 6), leaf(4, dtype=torch.complex64)))


@case()
def complex_output() -> Call:
    def function(x: Tensor) -> Tensor:
        return torch.view_as_complex(x.view(5, 3, 2)).exp().conj()

    return Call(function, (leaf(5, 6),))


@case(
    not_reentrant="no positional tensor requires a gradient",
    cpu_only="emu has no sparse tensors",
)
def sparse_embedding() -> Call:
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Tanh(), nn.Linear(6, 6))
    return Call(model, (torch.randint(9, (5,)),))


@case()
def cat_split_sort_topk() -> Call:
    def function(x: Tensor) -> Tensor:
        a, b, c = torch.cat([x, x.sin()], 1).split(4, dim=1)
        ordered, order = a.sort(dim=1)
        values, indices = b.topk(2, dim=1)
        return torch.cat(
            [ordered * order, values * indices, c.cumsum(0), x.gather(1, order)], 1
        )

    return Call(function, (leaf(5, 6),))


@case()
def channels_last_convolution() -> Call:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3, groups=2))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)
    return Call(model, (x.requires_grad_(),))


@case()
def pooling_and_interpolation() -> Call:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.PReLU()
    )

    def function(x: Tensor) -> Tensor:
        y = model(x)
        return F.interpolate(
            y, scale_factor=2, mode="bilinear"
        ) + F.adaptive_avg_pool2d(y, 1)

    return Call(function, (leaf(2, 2, 8, 8),), state={"model": model})


@case()
def losses_inside() -> Call:
    head = nn.Linear(6, 9)

    def function(x: Tensor, target: Tensor) -> Tensor:
        logits = head(x)
        return F.cross_entropy(logits, target) + logits.logsumexp(-1).pow(2).mean()

    return Call(function, (leaf(5, 6), torch.randint(9, (5,))), state={"head": head})


@case()
def linear_algebra() -> Call:
    def function(x: Tensor) -> Tensor:
        q, r = torch.linalg.qr(x)
        inverse = torch.linalg.inv(x.T @ x + 4 * torch.eye(5))
        return torch.einsum("ij,jk,kl->il", q, r, inverse) + torch.linalg.det(r)

    return Call(function, (leaf(6, 5),))


@case()
def zero_sized_tensors() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        nobody = linear(x[:0]).tanh()
        return torch.cat([nobody, (x * 2).sin()])

    return Call(function, (leaf(5, 6),), state={"linear": linear})
