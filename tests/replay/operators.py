"""All operator-level cases, each entered by the module that holds its idea."""

from tests.replay import draws, functions, kernels, layers, programs, views, writes
from tests.replay.registry import OPERATORS, OperatorCase

__all__ = [
    "OPERATORS",
    "OperatorCase",
    "draws",
    "functions",
    "kernels",
    "layers",
    "programs",
    "views",
    "writes",
]
