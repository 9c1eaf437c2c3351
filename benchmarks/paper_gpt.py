"""The GPT of Korthikanti and others 2022 (arXiv:2205.05198), on one device.

It is written so that each tensor which the paper counts is kept once, by a module whose
name tells which term it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from membudget.memory.formulas import TransformerShape

# Which module of a layer keeps which term of the paper.
LAYER_TERMS = {
    "norm_1": "norm_inputs",
    "query": "qkv_input",
    "core.scores": "query_and_key",
    "core.softmax": "softmax_output",
    "core.dropout": "softmax_dropout_mask",
    "core.values": "value",
    "projection": "projection_input",
    "dropout": "attention_dropout_mask",
    "norm_2": "norm_inputs",
    "up": "mlp_input",
    "gelu": "gelu_input",
    "down": "gelu_output",
    "mlp_dropout": "mlp_dropout_mask",
}


class Dropout(nn.Module):
    """Dropout that keeps its mask, a byte for each element."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop a tenth."""
        dropped: Tensor = torch.native_dropout(x, 0.1, True)[0]
        return dropped


class Product(nn.Module):
    """A product of matrices."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply."""
        return torch.bmm(a, b)


class Core(nn.Module):
    """What selective recomputation makes again; each part that keeps has a name."""

    def __init__(self) -> None:
        """Make the parts."""
        super().__init__()
        self.scores = Product()
        self.softmax = nn.Softmax(-1)
        self.dropout = Dropout()
        self.values = Product()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; all three are (batch · heads, sequence, width of a head)."""
        weights = self.softmax(self.scores(query, key.transpose(1, 2)))
        out: Tensor = self.values(self.dropout(weights), value)
        return out


class Layer(nn.Module):
    """The layer of the paper's figure 2."""

    def __init__(
        self, hidden: int, heads: int, core: nn.Module | None = None, flat: bool = True
    ) -> None:
        """Make the parts.

        Args:
            hidden: The width.
            heads: Of the attention.
            core: What attends, if not a `Core`.
            flat: Whether it takes batch and heads as one dimension.
        """
        super().__init__()
        self.heads = heads
        self.flat = flat
        self.norm_1 = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.core = core or Core()
        self.projection = nn.Linear(hidden, hidden)
        self.dropout = Dropout()
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * hidden, hidden)
        self.mlp_dropout = Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then the MLP; each is added to what it reads."""
        x = x + self.dropout(self.projection(self._attend(self.norm_1(x))))
        out: Tensor = self.mlp_dropout(self.down(self.gelu(self.up(self.norm_2(x)))))
        return out + x

    def _attend(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        # The scale goes into the query: no second tensor of s² is made.
        query = self.query(x) * (hidden // self.heads) ** -0.5
        parts = (self._split(part) for part in (query, self.key(x), self.value(x)))
        out: Tensor = self.core(*parts)
        out = out.view(batch, self.heads, sequence, -1).transpose(1, 2)
        return out.reshape(batch, sequence, hidden)

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads.flatten(0, 1) if self.flat else heads


class GPT(nn.Module):
    """Embeddings, layers, a norm, the projection to the vocabulary, and the loss."""

    def __init__(self, shape: TransformerShape, layers: int, vocabulary: int) -> None:
        """Make the parts; the projection has the embedding's weight."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.dropout = Dropout()
        self.layers = nn.ModuleList(
            Layer(shape.hidden, shape.heads) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, vocabulary, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, which is computed in single precision."""
        positions = torch.arange(tokens.shape[1])
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
