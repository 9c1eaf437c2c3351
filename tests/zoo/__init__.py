"""Small calls with one awkward property each: the animals that regions are tried on.

Each module holds the cases of one idea and enters them into `CASES`.
"""

from tests.zoo import (
    arguments,
    attributes,
    differentiation,
    layers,
    mutation,
    precision,
    randomness,
    state,
)
from tests.zoo.case import CASES, Call, Case

__all__ = [
    "CASES",
    "Call",
    "Case",
    "arguments",
    "attributes",
    "differentiation",
    "layers",
    "mutation",
    "precision",
    "randomness",
    "state",
]
