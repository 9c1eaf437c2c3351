"""Closed forms: activations that a transformer saves for its backward pass.

From Korthikanti and others: Reducing Activation Recomputation in Large Transformer
Models, 2022, arXiv:2205.05198, "the paper" below. Its symbols: `b` batch, `s` sequence,
`h` hidden, `a` heads, `L` layers, `v` vocabulary, `t` ranks of tensor parallelism.
Activations have two bytes per element, dropout masks one. Each figure is for one rank,
and an exact integer.

The layer is GPT's: norm, attention with dropout on its probabilities, projection,
dropout, sum; norm, linear to 4h, GELU, linear to h, dropout, sum.

Never counted: parameters, gradients, a norm's mean and deviation (2bs elements per
norm), attention masks, temporaries of the forward, workspaces, communication.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Literal, get_args

from membudget.errors import OptionError
from membudget.memory.optimizer_states import (
    adafactor_bytes,
    adam_bytes,
    check_divides,
    check_positive,
    sgd_bytes,
)

__all__ = [
    "LayerTerms",
    "Recompute",
    "TransformerShape",
    "adafactor_bytes",
    "adam_bytes",
    "extra_terms",
    "flash_layer_terms",
    "layer_bytes",
    "layer_terms",
    "model_bytes",
    "sgd_bytes",
]


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The sizes of a transformer layer, and the ranks that share it.

    Attributes:
        batch: Sequences in one micro-batch, `b`.
        sequence: Tokens in a sequence, `s`.
        hidden: Elements per token, `h`.
        heads: Attention heads, `a`; must divide `h`.
        tensor_parallel: Ranks that share the heads and the 4h of the MLP, `t`.
        sequence_parallel: Whether the ranks share the tokens outside those.

    Raises:
        OptionError: If a size is not a positive integer, or a divisor does not divide.
    """

    batch: int
    sequence: int
    hidden: int
    heads: int
    tensor_parallel: int = field(default=1, kw_only=True)
    sequence_parallel: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Reject sizes that no layer can have."""
        sizes = asdict(self)
        is_split = sizes.pop("sequence_parallel")
        check_positive(**sizes)
        check_divides("heads", self.heads, "hidden", self.hidden)
        check_divides("tensor_parallel", self.tensor_parallel, "heads", self.heads)
        if is_split:
            ranks = self.tensor_parallel
            check_divides("tensor_parallel", ranks, "sequence", self.sequence)

    @property
    def sbh(self) -> int:
        """Elements of the layer's input."""
        return self.sequence * self.batch * self.hidden

    @property
    def of_rank(self) -> int:
        """Elements per rank of an sbh tensor between the two linears of a half."""
        return self.sbh // self.tensor_parallel

    @property
    def outside(self) -> int:
        """Elements per rank of an sbh tensor outside the linears."""
        return self.of_rank if self.sequence_parallel else self.sbh


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Bytes that one layer saves, term by term: section 4.1 of the paper.

    Attributes:
        qkv_input: Input of the three projections, 2sbh.
        query_and_key: Factors of the scores, 4sbh.
        softmax_output: The attention probabilities, 2bs²a.
        softmax_dropout_mask: Dropout mask of the probabilities, bs²a.
        softmax_dropout_output: Probabilities after dropout, 2bs²a.
        value: The values, 2sbh.
        log_sum_exp: Statistics of flash attention, instead of the three with s².
        projection_input: Output of the heads, 2sbh.
        attention_dropout_mask: Dropout mask of the attention's output, sbh.
        mlp_input: Input of the first linear, 2sbh.
        gelu_input: Output of the first linear, 8sbh.
        gelu_output: Input of the second linear, 8sbh.
        mlp_dropout_mask: Dropout mask of the MLP's output, sbh.
        norm_inputs: Inputs of both norms, 4sbh.
    """

    qkv_input: int
    query_and_key: int
    softmax_output: int
    softmax_dropout_mask: int
    softmax_dropout_output: int
    value: int
    log_sum_exp: int
    projection_input: int
    attention_dropout_mask: int
    mlp_input: int
    gelu_input: int
    gelu_output: int
    mlp_dropout_mask: int
    norm_inputs: int

    @property
    def core(self) -> int:
        """Bytes that selective recomputation drops (it keeps q, k and v): 5bs²a."""
        masked = self.softmax_dropout_mask + self.softmax_dropout_output
        return self.softmax_output + masked + self.log_sum_exp

    @property
    def attention(self) -> int:
        """The attention's share: 11sbh + 5bs²a."""
        return self.total - self.mlp - self.norm_inputs

    @property
    def mlp(self) -> int:
        """The MLP's share: 19sbh."""
        gelu = self.gelu_input + self.gelu_output
        return self.mlp_input + gelu + self.mlp_dropout_mask

    @property
    def total(self) -> int:
        """The layer's bytes: sbh(34 + 5as/h), equation 1 of the paper."""
        return sum(astuple(self))


def layer_terms(shape: TransformerShape) -> LayerTerms:
    """Return what one layer saves, term by term.

    Tensor parallelism splits everything between the two linears of each half by heads,
    or by the 4h: sbh(10 + 24/t + 5as/(ht)), equation 2 of the paper. Sequence
    parallelism also splits the rest by tokens: sbh/t (34 + 5as/h), equation 4.

    Example:
        >>> terms = layer_terms(TransformerShape(1, 2048, 12288, 96))  # GPT-3 175B
        >>> terms.attention, terms.mlp, terms.norm_inputs
        (2290089984, 478150656, 100663296)
    """
    split, rest = shape.of_rank, shape.outside
    heads = shape.heads // shape.tensor_parallel
    probabilities = shape.batch * shape.sequence**2 * heads
    return LayerTerms(
        qkv_input=2 * rest,
        query_and_key=4 * split,
        softmax_output=2 * probabilities,
        softmax_dropout_mask=probabilities,
        softmax_dropout_output=2 * probabilities,
        value=2 * split,
        log_sum_exp=0,
        projection_input=2 * split,
        attention_dropout_mask=rest,
        mlp_input=2 * rest,
        gelu_input=8 * split,
        gelu_output=8 * split,
        mlp_dropout_mask=rest,
        norm_inputs=4 * rest,
    )


def flash_layer_terms(shape: TransformerShape) -> LayerTerms:
    """Return what one layer saves with fused attention: 34sbh + 4bas.

    Flash attention (Dao, Fu, Ermon, Rudra, Ré 2022, arXiv:2205.14135, section 3.1)
    saves q, k, v, its output, and for each row of the scores the logarithm of the sum
    of exponentials, in single precision: 4bas bytes. The output is the input of the
    projection and counted there. Ranks share it by the paper's rules.

    Returns:
        Bytes of one rank. Not counted, besides the list at the top of this module: the
        seed of the fused dropout, and rows that a kernel adds as padding.

    Example:
        >>> shape = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)
        >>> flash_layer_terms(shape).total - 34 * shape.sbh  # 4 · 1 · 96 · 2048
        786432
    """
    rows = shape.batch * shape.heads // shape.tensor_parallel * shape.sequence
    return replace(
        layer_terms(shape),
        softmax_output=0,
        softmax_dropout_mask=0,
        softmax_dropout_output=0,
        log_sum_exp=4 * rows,
    )


def layer_bytes(shape: TransformerShape, recompute: Recompute = "none") -> int:
    """Return what one layer saves between forward and backward: table 2 of the paper.

        recompute    tensor parallel              tensor and sequence parallel
        none         sbh(10 + 24/t + 5as/(ht))    sbh(34/t + 5as/(ht))
        selective    sbh(10 + 24/t)               sbh(34/t)
        full         sbh(2)                       sbh(2)

    Args:
        shape: Sizes of the layer.
        recompute: What the backward pass recomputes: `"none"`, `"selective"` for
            everything between q, k, v and the projection's input, or `"full"` for
            everything but the layer's input.

    Returns:
        Bytes of one rank. With `"full"` each rank keeps the whole input; splitting it,
        2sbh/t, would cost one more all-gather per layer. Not counted, besides the list
        at the top of this module: what a recompute saves again.

    Raises:
        OptionError: If `recompute` has any other value.

    Example:
        >>> shape = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)
        >>> [layer_bytes(shape, how) // shape.sbh for how in ("none", "selective")]
        [114, 34]
        >>> layer_bytes(shape, "full") // shape.sbh
        2
    """
    if recompute not in get_args(Recompute):
        words = ", ".join(get_args(Recompute))
        raise OptionError(f"recompute must be one of {words}; got {recompute!r}")
    if recompute == "full":
        return 2 * shape.sbh
    terms = layer_terms(shape)
    return terms.total - (terms.core if recompute == "selective" else 0)


def extra_terms(shape: TransformerShape, vocabulary: int) -> dict[str, int]:
    """Return what a model saves outside its layers, without pipeline parallelism.

    Section 4.3 of the paper for p = 1: the embedding's dropout, sbh/t; the input of the
    last norm, 2sbh/t; that of the projection to the vocabulary, 2sbh/t; the logits in
    single precision, 4sbv/t. Without sequence parallelism only the logits are split.

    Returns:
        Bytes of one rank, by name. Not counted: token ids and targets, and the logits
        in half precision, which are freed once converted to single precision.

    Example:
        >>> shape = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)
        >>> extra = extra_terms(shape, vocabulary=51200)
        >>> extra["logits"], sum(extra.values())
        (419430400, 545259520)
    """
    check_positive(vocabulary=vocabulary)
    ranks, rest = shape.tensor_parallel, shape.outside
    check_divides("tensor_parallel", ranks, "vocabulary", vocabulary)
    return {
        "embedding_dropout_mask": rest,
        "norm_input": 2 * rest,
        "output_input": 2 * rest,
        "logits": 4 * shape.sequence * shape.batch * (vocabulary // ranks),
    }


def model_bytes(
    shape: TransformerShape, layers: int, vocabulary: int, recompute: Recompute = "none"
) -> int:
    """Return what a whole model saves between forward and backward.

    `L` layers and everything outside them, without pipeline parallelism: equation 5
    of the paper for p = 1, with the extra memory of its section 4.3.

    Example:
        >>> shape = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)
        >>> [model_bytes(shape, 96, 51200, how) for how in ("none", "selective")]
        [275960037376, 82686509056]
    """
    check_positive(layers=layers)
    extra = extra_terms(shape, vocabulary)
    return layers * layer_bytes(shape, recompute) + sum(extra.values())
