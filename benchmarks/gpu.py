"""What an accelerator answers that no emulated device can: bytes, seconds, bits.

    python3 run.py gpu              the marked tests, then this
    python3 run.py bench gpu        this alone; `--small` for a device that is slow

A GPT is profiled, fitted to shares of its peak and trained. The figures, into
`results/DEVICE.json`: the profile's peak ÷ the allocator's, what a plan was predicted
to reserve and what it did, its slowdown, and whether the audit found the plain bits.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from harness import RESULTS, machine
from models import gpt
from rich.console import Console

import membudget as mb
from membudget import _torch_accelerator as accelerator
from membudget.step import Step

SHARES = ("80%", "60%", "40%")

SIZES = {"width": 1024, "heads": 16, "blocks": 12, "length": 1024, "batch": 8}
SMALL = {"width": 32, "heads": 2, "blocks": 2, "length": 16, "batch": 2}


def figures(model: Any, batch: Any, share: str) -> dict[str, Any]:
    """Fit the model to a share of its peak; return what that came to."""
    try:
        fitted = mb.fit(model, batch, share)
    except mb.BudgetError as error:
        return {"refused": str(error)}
    with fitted:
        plan, slowdown = fitted.plan, fitted.slowdown
        measured = fitted.attempts[-1].memory
        return {
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.peak_bytes,
            "reserved_bytes": fitted.peak_bytes,
            "requested_bytes": None if measured is None else measured.peak_bytes,
            "host_bytes": None if measured is None else measured.host_bytes,
            "predicted_slowdown": plan.slowdown,
            "slowdown": None if slowdown is None else slowdown.median,
            "regions": len(plan.regions),
            "is_equal": fitted.audit().equal,
        }


def plain_figures(model: Any, batch: Any) -> dict[str, Any]:
    """Profile the plain step, on real and on fake tensors, and meter it."""
    step = Step(model, batch, None)
    real, fake = mb.profile(model, batch), mb.profile(model, batch, fake=True)
    step.run()
    step.prepare()
    metered = mb.peak(step.run)
    step.prepare()
    return {
        "requested_bytes": metered.peak_bytes,
        "reserved_bytes": metered.reserved_bytes,
        "profiled_bytes": real.peak_bytes,
        "faked_bytes": fake.peak_bytes,
        "seconds": real.graph.seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures; without an accelerator, do nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a model of two blocks")
    parsed = parser.parse_args(arguments)
    console = Console()
    if not torch.accelerator.is_available():
        console.print("torch knows no accelerator here: nothing was measured")
        return 2
    device = torch.device(str(accelerator.kind()), 0)
    model, (inputs, targets) = gpt(**(SMALL if parsed.small else SIZES))
    model.to(device)
    batch = inputs.to(device), targets.to(device)
    results: dict[str, Any] = {
        "device": accelerator.name_of(device),
        "machine": machine(),
        "plain": plain_figures(model, batch),
        **{share: figures(model, batch, share) for share in SHARES},
    }
    console.print(results)
    if not parsed.small:
        path = RESULTS / f"{slug(device)}.json"
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        console.print(f"written to {path.name}")
    return 0


def slug(device: torch.device) -> str:
    """Return what a file on a device is called, such as `cuda-nvidia-l4`."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    name = f"{device.type} {'' if ask is None else ask(device)}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
