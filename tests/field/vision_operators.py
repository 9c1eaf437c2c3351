"""Import torchvision where its compiled operators do not load.

PyPI has torchvision for CUDA's build of torch only. Beside the CPU build its Python
works, and no model here calls its operators; but its import wants two to be declared.
"""

from __future__ import annotations

import functools
import importlib

import torch

WANTED = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms")
)


@functools.cache
def import_torchvision() -> torch.library.Library | None:
    """Import torchvision; return the declarations that it took; they must live on."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        declared = torch.library.Library("torchvision", "DEF")
        for schema in WANTED:
            declared.define(schema)
        importlib.import_module("torchvision")
        return declared
    return None
