"""Whatever a caller could find changed of a model, to be compared by `==`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the facts of a model and of the random stream, by a name each."""
    facts: dict[str, Any] = {}
    for name, module in model.named_modules():
        facts[f"class {name}"] = type(module)
        facts[f"names {name}"] = sorted(module.__dict__)
        hooks = {k: len(v) for k, v in module.__dict__.items() if k.endswith("hooks")}
        facts[f"hooks {name}"] = hooks
    for name, tensor in model.state_dict().items():
        facts[f"value {name}"] = tensor.tolist()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        facts[f"gradient {name}"] = None if grad is None else grad.tolist()
    facts["stream"] = torch.get_rng_state().tolist()
    return facts
