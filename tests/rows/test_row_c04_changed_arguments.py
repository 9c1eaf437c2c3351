"""Row C4: a call with other arguments, such as `use_cache`, has a plan of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import membudget as mb
from tests.loop.training import tokens
from tests.loops.models import Language


class Caching(Language):
    """Keeps what its blocks return, if it is asked to."""

    def forward(self, tokens: Tensor, *args: Any, use_cache: bool = True) -> Any:
        x, kept = self.embed(tokens), []
        for block in self.blocks:
            x = block(x)
            if use_cache:
                kept.append(x * 2)
        return self.head(x), kept


def test_a_call_with_other_arguments_is_another_situation():
    def weights(limit: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Caching()
        budget = mb.budget(model, limit or "100%")
        if limit:
            budget.start()
        for use_cache in (True, True, False, False):
            logits, cache = model(tokens(32), use_cache=use_cache)
            (logits.square().mean() + sum(c.mean() for c in cache)).backward()
        budget.stop()
        if limit:
            found = budget.status().situations
            assert len(found) == 3  # The second call finds gradients.
            assert all(s.last_bytes <= s.left_bytes for s in found)
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, weights(None), weights("70%")))
