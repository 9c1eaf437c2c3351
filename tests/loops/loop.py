"""What a training loop does, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

from tests.loops.models import MODELS

STEPS = 5

INSIDE = ("inside", "inside blocks")
"""Where autocast may be on within a model."""


@dataclass(frozen=True)
class Loop:
    """What a training loop does; every field is drawn.

    Attributes:
        model: Name of the model.
        sizes: Size of each micro-batch, in turn.
        accumulation: Micro-batches of one step.
        autocast: Where autocast is on, if anywhere: around all micro-batches of a step,
            around each forward, or inside the model's forward or those of its blocks.
        scaler: How a `GradScaler` scales the loss, if one does: so that gradients
            overflow at first, and steps are skipped, or not.
        optimizer: Name of the optimizer, in `torch.optim`.
        is_late: Whether the optimizer is made after the first backward pass.
        sets_none: What `zero_grad` does; and whether it runs before the backward pass.
        zeroes_before: Whether `zero_grad` runs between forward and backward.
        evaluates: Whether the model is evaluated between the steps.
        generates: Whether it generates between the steps: with all tokens in each call,
            or with a cache of keys and values.
        frozen: Whether half of the parameters are frozen after two steps.
        clips: Whether gradients are clipped.
        averages: Whether a copy of the model follows it.
        has_labels: Whether the model computes its loss itself, if it can.
        keeps_output: Whether the loop's variables keep the last output alive.
        twice: Whether two forwards run before one backward pass.
        inner: Whether each step takes a step of its own inside (MAML).
        adversary: Whether a second model is trained in turn (GAN).
        share: The budget ÷ the peak of the plain loop.
    """

    model: str
    sizes: tuple[int, ...]
    accumulation: int
    autocast: str
    scaler: str
    optimizer: str
    is_late: bool
    sets_none: bool
    zeroes_before: bool
    evaluates: bool
    generates: str
    frozen: bool
    clips: bool
    averages: bool
    has_labels: bool
    keeps_output: bool
    twice: bool
    inner: bool
    adversary: bool
    share: float

    def __str__(self) -> str:
        """Name all that differs from the simplest loop."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{k}={v}" for k, v in shown.items() if v not in (False, ""))


def drawn(seed: int) -> Loop:
    """Draw a loop."""
    draw = random.Random(seed)

    def rarely(share: float) -> bool:
        return draw.random() < share

    model = draw.choice(list(MODELS))
    base = 8 if model in ("images", "recurrent") else 16
    accumulation = draw.choice((1, 1, 2, 3, 8))
    spread = draw.choice(((1.0,), (1.0,), (0.25, 4.0), (0.5, 1.0, 2.0)))
    count = STEPS * accumulation
    grows = len(spread) > 1
    sizes = [
        max(2, int(base * (draw.uniform(spread[0], spread[-1]) if grows else 1.0)))
        for _ in range(count)
    ]
    twice, inner, adversary = rarely(0.08), rarely(0.06), rarely(0.08)
    closure = rarely(0.06) and not inner
    optimizer = draw.choice(("SGD", "AdamW", "AdamW", "Adam", "RMSprop"))
    return Loop(
        model=model,
        sizes=tuple(sizes),
        accumulation=1 if closure or inner else accumulation,
        autocast=draw.choice(
            ("", "", "", "", "forward", "forward", "around", "around", *INSIDE)
        ),
        scaler="" if closure else draw.choice((*[""] * 8, "steps", "overflows")),
        optimizer="LBFGS" if closure else optimizer,
        is_late=rarely(0.2),
        sets_none=not rarely(0.2),
        zeroes_before=rarely(0.15),
        evaluates=rarely(0.2),
        generates=draw.choice((*[""] * 6, "whole", "cached")),
        frozen=rarely(0.1),
        clips=rarely(0.2),
        averages=rarely(0.15),
        has_labels=rarely(0.4),
        keeps_output=rarely(0.5),
        twice=twice,
        inner=inner,
        adversary=adversary and not inner,
        share=draw.uniform(0.3, 0.9),
    )
