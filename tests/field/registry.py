"""Every architecture of the field suite, by name."""

from __future__ import annotations

from tests.field import (
    decoders,
    diffusion,
    encoders,
    functions,
    graphs,
    inner_gradients,
    loops,
    sequences,
    vision,
)
from tests.field.case import Case

FILES = (
    decoders,
    encoders,
    sequences,
    vision,
    diffusion,
    graphs,
    loops,
    inner_gradients,
    functions,
)

CASES: dict[str, Case] = {
    case.name: case
    for file in FILES
    for case in vars(file).values()
    if isinstance(case, Case)
}
