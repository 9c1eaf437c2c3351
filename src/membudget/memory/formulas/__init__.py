"""Closed forms: saved activations of a transformer, state of an optimizer."""

from membudget.memory.formulas.activations import (
    LayerTerms,
    Recompute,
    extra_terms,
    flash_layer_terms,
    layer_bytes,
    layer_terms,
    model_bytes,
)
from membudget.memory.formulas.optimizers import (
    adafactor_bytes,
    adam_bytes,
    sgd_bytes,
)
from membudget.memory.formulas.shapes import TransformerShape

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
