"""Closed forms for the activations that a transformer saves for its backward pass.

The formulas are from Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models, 2022, arXiv:2205.05198 ("the paper"). Symbols: `b` batch, `s`
sequence, `h` hidden, `a` heads, `L` layers, `v` vocabulary, `t` tensor-parallel ranks.
Activations take two bytes per element, dropout masks one. All results are exact
integers for one rank.

The layer is a GPT block: norm, attention with dropout on its probabilities, projection,
dropout, sum; norm, linear to 4h, GELU, linear to h, dropout, sum.

Never counted: parameters, gradients, each norm's mean and standard deviation (2bs
elements), attention masks, temporaries of the forward, workspaces, communication.
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
    """The sizes of a transformer layer, and the number of ranks that share the layer.

    Attributes:
        batch: Sequences per micro-batch, `b`.
        sequence: Tokens per sequence, `s`.
        hidden: Elements per token, `h`.
        heads: Number of attention heads, `a`; must divide `h`.
        tensor_parallel: Number of ranks that split attention and MLP, `t`.
        sequence_parallel: Whether ranks split tensors outside attention and MLP, too.

    Raises:
        OptionError: If a size is not a positive integer, or if `hidden`, `heads` or
            `sequence` cannot be split evenly.
    """

    batch: int
    sequence: int
    hidden: int
    heads: int
    tensor_parallel: int = field(default=1, kw_only=True)
    sequence_parallel: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Reject sizes that are not positive, or not evenly divisible as required."""
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
        """Number of elements of the layer's input."""
        return self.sequence * self.batch * self.hidden

    @property
    def of_rank(self) -> int:
        """Elements per rank of an s·b·h tensor split by tensor parallelism."""
        return self.sbh // self.tensor_parallel

    @property
    def outside(self) -> int:
        """Elements per rank of an s·b·h tensor split only by sequence parallelism."""
        return self.of_rank if self.sequence_parallel else self.sbh


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Bytes that one layer saves, term by term: section 4.1 of the paper.

    Attributes:
        qkv_input: Input of the query, key and value projections, 2sbh.
        query_and_key: Queries and keys, 4sbh.
        softmax_output: Attention probabilities, 2bs²a.
        softmax_dropout_mask: Dropout mask of the attention probabilities, bs²a.
        softmax_dropout_output: Attention probabilities after dropout, 2bs²a.
        value: Attention values, 2sbh.
        log_sum_exp: Row statistics that flash attention saves instead of terms in s².
        projection_input: Output of the attention heads, 2sbh.
        attention_dropout_mask: Dropout mask of the attention's output, sbh.
        mlp_input: Input of the MLP's first linear layer, 2sbh.
        gelu_input: Output of the MLP's first linear layer, 8sbh.
        gelu_output: Input of the MLP's second linear layer, 8sbh.
        mlp_dropout_mask: Dropout mask of the MLP's output, sbh.
        norm_inputs: Inputs of the layer's two norms, 4sbh.
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
        """Bytes that selective recomputation drops, 5bs²a; q, k and v are retained."""
        masked = self.softmax_dropout_mask + self.softmax_dropout_output
        return self.softmax_output + masked + self.log_sum_exp

    @property
    def attention(self) -> int:
        """Bytes that the attention saves: 11sbh + 5bs²a."""
        return self.total - self.mlp - self.norm_inputs

    @property
    def mlp(self) -> int:
        """Bytes that the MLP saves: 19sbh."""
        gelu = self.gelu_input + self.gelu_output
        return self.mlp_input + gelu + self.mlp_dropout_mask

    @property
    def total(self) -> int:
        """Bytes that the layer saves: sbh(34 + 5as/h), equation 1 of the paper."""
        return sum(astuple(self))


def layer_terms(shape: TransformerShape) -> LayerTerms:
    """Return the bytes that one layer saves, term by term.

    Tensor parallelism splits the tensors inside attention by heads and inside the MLP
    by features: sbh(10 + 24/t + 5as/(ht)), equation 2 of the paper. Sequence
    parallelism splits all other tensors by tokens: sbh/t (34 + 5as/h), equation 4.

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
    """Return the bytes that one layer saves with flash attention: 34sbh + 4bas.

    Flash attention (Dao, Fu, Ermon, Rudra, Ré 2022, arXiv:2205.14135, section 3.1)
    saves q, k, v, its output, and the log-sum-exp of each row of the scores in single
    precision: 4bas bytes. The attention output counts as the input of the projection.

    Returns:
        Bytes per rank, without the fused dropout's seed and the kernel's padding rows.

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
    """Return the bytes that one layer saves for backward: table 2 of the paper.

        recompute    tensor parallel              tensor and sequence parallel
        none         sbh(10 + 24/t + 5as/(ht))    sbh(34/t + 5as/(ht))
        selective    sbh(10 + 24/t)               sbh(34/t)
        full         sbh(2)                       sbh(2)

    Args:
        shape: Sizes and parallelism of the layer.
        recompute: Tensors that the backward pass recomputes: `"none"`, `"selective"`
            for those between q, k, v and the projection's input, or `"full"` for all
            except the layer's input.

    Returns:
        Bytes per rank. With `"full"`, each rank retains the whole layer input, because
        splitting it (2sbh/t) would cost one more all-gather per layer. Tensors that are
        saved again during a recompute are not counted.

    Raises:
        OptionError: If `recompute` is not one of the three listed names.

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
    """Return the bytes that a model saves outside its layers.

    Without pipeline parallelism (p = 1 in section 4.3 of the paper), a model saves the
    dropout mask of the embedding, sbh/t; the inputs of the last norm and of the output
    projection, 2sbh/t each; and the logits in single precision, 4sbv/t. Without
    sequence parallelism, the ranks split only the logits.

    Returns:
        Bytes per rank, by name of the term. Not counted: token ids, targets, and logits
        in half precision, which are freed after conversion to single precision.

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
    """Return the bytes that a whole model saves for its backward pass.

    The result is the sum over `L` layers and `extra_terms`, without pipeline
    parallelism: equation 5 and section 4.3 of the paper for p = 1.

    Example:
        >>> shape = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)
        >>> [model_bytes(shape, 96, 51200, how) for how in ("none", "selective")]
        [275960037376, 82686509056]
    """
    check_positive(layers=layers)
    extra = extra_terms(shape, vocabulary)
    return layers * layer_bytes(shape, recompute) + sum(extra.values())
