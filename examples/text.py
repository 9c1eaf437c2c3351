"""Real text to train on, with nothing to download.

Every CPython carries the reference text behind `help()` in `pydoc_data.topics`: about
465,000 characters of English. It differs a little from one Python version to the next,
so whoever reports a loss should report `Corpus.digest` beside it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 256
"""Tokens are bytes."""


@dataclass(frozen=True)
class Corpus:
    """A text as one long row of byte tokens."""

    tokens: Tensor
    digest: str

    def batch(
        self, size: int, length: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw pieces of the text at random places.

        Args:
            size: The number of pieces.
            length: Tokens in each.
            generator: Where the places are drawn from; the global random state is left
                alone, so that it belongs to the model's dropout.

        Returns:
            The tokens and their successors, which are the targets, both as integers
            of shape (size, length).
        """
        last = len(self.tokens) - length
        starts = torch.randint(last, (size, 1), generator=generator)
        pieces = self.tokens[starts + torch.arange(length + 1)]
        return pieces[:, :-1], pieces[:, 1:]


def load() -> Corpus:
    """Return the whole of `pydoc_data.topics`, topic after topic in sorted order."""
    content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    return Corpus(tokens, hashlib.sha256(content).hexdigest())
