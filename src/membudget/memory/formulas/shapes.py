"""The sizes that closed forms are of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from membudget.errors import OptionError


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The sizes of a transformer's layer, and the ranks that share it.

    Attributes:
        batch: Sequences in one micro-batch, `b`.
        sequence: Tokens in a sequence, `s`.
        hidden: Elements for each token, `h`.
        heads: Heads of attention, `a`; they divide `h`.
        tensor_parallel: Ranks that share the heads, and the 4h, `t`.
        sequence_parallel: Whether they share the tokens where they share no heads.

    Raises:
        OptionError: If a size is no positive integer, or one does not divide the other.
    """

    batch: int
    sequence: int
    hidden: int
    heads: int
    tensor_parallel: int = field(default=1, kw_only=True)
    sequence_parallel: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse sizes that no layer has."""
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
        """Elements that a rank has of a tensor of sbh, between the two linears."""
        return self.sbh // self.tensor_parallel

    @property
    def outside(self) -> int:
        """Elements that a rank has of a tensor of sbh, outside of the linears."""
        return self.of_rank if self.sequence_parallel else self.sbh


def check_positive(**sizes: int) -> None:
    """Refuse sizes that are no positive integers.

    Raises:
        OptionError: With the name of the first.
    """
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise OptionError(
                f"{name} must be a positive integer; got {size!r}: pass 1 or more"
            )


def check_divides(name: str, divisor: int, of: str, number: int) -> None:
    """Refuse a size that does not divide another.

    Raises:
        OptionError: With both.
    """
    if number % divisor:
        raise OptionError(
            f"{name} must divide {of}, and {number} over {divisor} leaves "
            f"{number % divisor}: pass a divisor of {number}"
        )
