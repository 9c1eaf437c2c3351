"""What a replay region keeps: ready-made policies, which compose with `|`, `&`, `~`.

>>> import membudget as mb
>>> keep = mb.policies.matmuls | mb.policies.attention
"""

from __future__ import annotations

from membudget.engine.policy import (
    Candidate,
    Policy,
    attention,
    convolutions,
    everything,
    inside,
    matmuls,
    named,
    nothing,
    operators,
)

__all__ = [
    "Candidate",
    "Policy",
    "attention",
    "convolutions",
    "everything",
    "inside",
    "matmuls",
    "named",
    "nothing",
    "operators",
]
