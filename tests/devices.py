"""The device that a run of the tests is about: `pytest --device=NAME`, or the CPU."""

from __future__ import annotations

import torch


def default_generators() -> list[torch.Generator]:
    """Return the random streams of the CPU and of the accelerator in use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return [torch.default_generator]
    module = torch.get_device_module(accelerator)
    return [torch.default_generator, *module.default_generators]
