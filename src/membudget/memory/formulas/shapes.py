"""The sizes that closed forms take, and checks of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from membudget.errors import OptionError


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
        sizes = dataclasses.asdict(self)
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


def check_positive(**sizes: int) -> None:
    """Reject sizes that are not positive integers.

    Raises:
        OptionError: Names the first such size.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise OptionError(
                f"{name} must be a positive integer; got {size!r}: pass 1 or more"
            )


def check_divides(name: str, divisor: int, of: str, number: int) -> None:
    """Reject a size that does not divide another.

    Raises:
        OptionError: Names both.
    """
    if number % divisor:
        raise OptionError(
            f"{name} must divide {of}, and {number} over {divisor} leaves "
            f"{number % divisor}: pass a divisor of {number}"
        )
