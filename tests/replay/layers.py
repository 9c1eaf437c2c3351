"""Cases made of layers: recurrent, normalising, attending, convolving, routing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.devices import device_type
from tests.replay.registry import operators
from tests.zoo import Call
from tests.zoo.case import leaf


def _bf16(enabled: bool = True) -> torch.autocast:
    return torch.autocast(device_type(), torch.bfloat16, enabled=enabled)


@operators()
def lstm_of_two_layers_with_dropout() -> Call:
    return Call(nn.LSTM(6, 4, num_layers=2, dropout=0.4), (leaf(5, 2, 6),))


@operators()
def lstm_both_ways_on_packed_sequences() -> Call:
    model = nn.LSTM(6, 4, bidirectional=True, batch_first=True)

    def function(x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([5, 3], device="cpu"), batch_first=True
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        return out.sin()

    return Call(function, (leaf(2, 5, 6),), state={"model": model})


@operators()
def gru_of_two_layers_with_dropout() -> Call:
    return Call(nn.GRU(6, 4, num_layers=2, dropout=0.4), (leaf(5, 2, 6),))


@operators()
def cells_in_a_loop() -> Call:
    cell, gate = nn.LSTMCell(6, 6), nn.GRUCell(6, 6)

    def function(x: Tensor) -> Tensor:
        state = (torch.zeros(2, 6), torch.zeros(2, 6))
        for step in x:
            hidden, memory = cell(step, state)
            state = (gate(hidden, memory), memory)
        return state[0].exp()

    return Call(function, (leaf(5, 2, 6),), state={"cell": cell, "gate": gate})


@operators(
    not_double="torch has no second derivative of the bag of embeddings",
    cpu_only="emu has no sparse tensors",
)
def embeddings_with_sparse_gradients() -> Call:
    model, bag = nn.Embedding(9, 6, sparse=True), nn.EmbeddingBag(9, 6, mode="max")

    def function(x: Tensor, tokens: Tensor) -> Tensor:
        return (model(tokens) * x).sin() + bag(tokens.view(1, 5)).exp()

    state = {"model": model, "bag": bag}
    return Call(function, (leaf(5, 6), torch.tensor([1, 1, 4, 8, 0])), state=state)


@operators(
    not_again="a region that runs again refuses to write what it reads",
    not_twice="the second call writes the weight that the first one's replay reads",
)
def embedding_renormalised() -> Call:
    model = nn.Embedding(9, 6, max_norm=1.0)

    def function(x: Tensor, tokens: Tensor) -> Tensor:
        before = (model.weight.detach().sum() + x).sin()
        return (model(tokens) * x).sin() * before

    tokens = torch.tensor([1, 1, 4, 8, 0])
    return Call(function, (leaf(5, 6), tokens), state={"model": model})


@operators()
def autocast_with_a_shared_weight() -> Call:
    weight, bias = leaf(6, 6), leaf(6)

    def function(x: Tensor) -> Tensor:
        with _bf16():
            with torch.no_grad():
                teacher = F.linear(x, weight)
            y = F.linear(x, weight, bias)
            y = F.linear(F.gelu(y), weight, bias) * teacher
            with _bf16(enabled=False):
                y = F.linear(y.float(), weight)
            y = F.layer_norm(F.linear(y, weight), (6,))
        return y.float().sin()

    return Call(function, (leaf(5, 6),), state={"weight": weight, "bias": bias})


@operators()
def autocast_around_the_region() -> Call:
    linear, norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def function(x: Tensor) -> Tensor:
        y = linear(x).softmax(-1) @ linear.weight
        return norm(linear(y)).exp() * F.dropout(y, 0.3)

    state = {"linear": linear, "norm": norm}
    return Call(function, (leaf(5, 6),), state=state, around=_bf16)


@operators()
def mixture_of_experts() -> Call:
    gate, experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def function(x: Tensor) -> Tensor:
        weights, chosen = gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            tokens, slot = (chosen == i).nonzero(as_tuple=True)
            if tokens.numel() == 0:
                continue
            scaled = expert(x.index_select(0, tokens)).tanh()
            out.index_add_(0, tokens, scaled * weights[tokens, slot].unsqueeze(1))
        return out + x.gather(1, chosen).sin().sum(1, keepdim=True)

    state = {"gate": gate, "experts": experts}
    return Call(function, (leaf(9, 6),), state=state)


@operators()
def batch_norm_in_training() -> Call:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
    )
    return Call(model, (leaf(2, 2, 5, 5),))


@operators()
def batch_norm_whose_statistics_are_read() -> Call:
    norm = nn.BatchNorm1d(6)

    def function(x: Tensor) -> Tensor:
        mean = norm.running_mean
        assert mean is not None
        before = (x + mean).sin()
        y = norm(norm(x).tanh())
        return before * y.exp() * (x - mean).cos()

    return Call(function, (leaf(5, 6),), state={"norm": norm})


@operators()
def batch_norm_in_evaluation() -> Call:
    norm = nn.BatchNorm1d(6)
    norm(torch.randn(5, 6))
    norm.eval()

    def function(x: Tensor) -> Tensor:
        return norm(x.sin()).exp()

    return Call(function, (leaf(5, 6),), state={"norm": norm})


@operators()
def other_norms() -> Call:
    model = nn.ModuleList(
        [
            nn.GroupNorm(2, 4),
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            nn.LayerNorm(6),
            nn.RMSNorm(6),
            nn.LocalResponseNorm(2),
        ]
    )

    def function(x: Tensor) -> Tensor:
        for norm in model:
            x = norm(x).tanh() * 1.5
        return F.normalize(x, dim=1) + x.renorm(2, 0, 1.0)

    return Call(function, (leaf(3, 4, 6),), state={"model": model})


@operators(not_double="torch has no second derivative of the flash kernel")
def attention_fused() -> Call:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True)
        return F.scaled_dot_product_attention(a, k.cos(), v).exp()

    return Call(function, tuple(leaf(2, 2, 5, 4) for _ in range(3)))


@operators()
def attention_with_dropout_and_mask() -> Call:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)
        bias = torch.zeros(5, 5).masked_fill_(mask.logical_not(), -1e4)
        return F.scaled_dot_product_attention(a, k, v, attn_mask=bias, dropout_p=0.5)

    mask = torch.ones(5, 5).tril().bool()
    return Call(function, (*(leaf(2, 2, 5, 4) for _ in range(3)), mask))


@operators()
def multihead_attention() -> Call:
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(2, 5, dtype=torch.bool)
        mask[1, 3:] = True
        y, weights = attention(x, x.sin(), x, key_padding_mask=mask)
        return y.exp(), weights

    return Call(function, (leaf(2, 5, 8),), state={"attention": attention})


@operators()
def transformer_decoder() -> Call:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def function(x: Tensor, memory: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        return layer(x, memory, tgt_mask=causal, tgt_is_causal=True)

    return Call(function, (leaf(2, 5, 8), leaf(2, 3, 8)), state={"layer": layer})


@operators()
def convolutions_and_pools() -> Call:
    model = nn.ModuleDict(
        {
            "first": nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
            "deep": nn.Conv2d(4, 4, 3, groups=4, dilation=2, padding=2),
            "up": nn.ConvTranspose2d(4, 2, 2, stride=2),
        }
    )

    def function(x: Tensor) -> Tensor:
        y = F.relu(model["deep"](model["first"](x)), inplace=True)
        pooled, places = F.max_pool2d(y, 2, return_indices=True)
        back = F.max_unpool2d(F.avg_pool2d(pooled, 1), places, [2, 2])
        up = model["up"](pooled)
        large = F.interpolate(pooled, scale_factor=2, mode="bicubic")
        near = F.interpolate(pooled, size=(8, 8), mode="nearest")
        return up.tanh() + (back * large * near).mean(1, keepdim=True).sin()

    return Call(function, (leaf(2, 2, 8, 8),), state={"model": model})


@operators()
def sampled_and_shuffled_images() -> Call:
    def function(x: Tensor, theta: Tensor) -> Tensor:
        grid = F.affine_grid(theta, [2, 4, 6, 6], align_corners=False)
        y = F.grid_sample(x, grid.tanh(), align_corners=False)
        y = F.pixel_shuffle(F.pad(y, (1, 1, 2, 2), mode="circular"), 2)
        y = F.adaptive_max_pool2d(y, 3) * F.lp_pool2d(x[:, :1].exp(), 2, 2)
        return F.fold(F.unfold(y, 2), (3, 3), 2).sin()

    return Call(function, (leaf(2, 4, 6, 6), leaf(2, 2, 3)))


@operators()
def channels_last() -> Call:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU())
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)

    def function(x: Tensor) -> Tensor:
        y = model(x * 2)
        return y.sin().contiguous() * F.dropout(y, 0.3) * torch.empty_like(y).fill_(2)

    return Call(function, (x.requires_grad_(),), state={"model": model})
