"""The ways of checkpointing a block that `selective` compares.

A way takes a block and returns how to call it. Each library is used as its manual says,
at its best: torch's policies are functions that look into a frozen set, torch_remat's
stream hook is left out where nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from models import Attend, Run
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb
from membudget.policies import (
    Policy,
    attention,
    convolutions,
    everything,
    matmuls,
    nothing,
)

Way = Callable[[nn.Module], Run]

PLAIN = "plain"
SAC = "torch SAC, matmuls"
REPLAY = "membudget replay, matmuls"
LEAST = "membudget rerun"

_aten = torch.ops.aten
# What to keep: everything that multiplies matrices. Its neighbours are cheap.
MATMULS = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    )
)


def ways() -> dict[str, Way]:
    """Return every way that is installed, the plain one first."""
    found: dict[str, Way] = {
        PLAIN: lambda block: block,
        "torch checkpoint": lambda block: partial(
            torch_checkpoint, block, use_reentrant=False
        ),
        "torch checkpoint_wrapper": checkpoint_wrapper,
        SAC: _selective(_keep_matmuls),
        "torch SAC, save all": _selective(_keep_all),
        "torch SAC, recompute all": _selective(_keep_nothing),
    }
    if has_torch_remat():
        found["torch_remat, matmuls"] = _torch_remat
    found[LEAST] = lambda block: partial(mb.checkpoint, block)
    found[REPLAY] = _replay(matmuls | attention | convolutions)
    found["membudget replay, everything"] = _replay(everything)
    found["membudget replay, nothing"] = _replay(nothing)
    return found


def _keep_matmuls(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator in MATMULS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_all(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _keep_nothing(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _selective(policy: Callable[..., CheckpointPolicy]) -> Way:
    # Saving everything saves the mask of dropout before it is filled in place. That is
    # an error by default, and harmless, because no operator runs again to see it.
    contexts = partial(
        create_selective_checkpoint_contexts,
        policy,
        allow_cache_entry_mutation=policy is _keep_all,
    )
    return lambda block: partial(
        torch_checkpoint, block, use_reentrant=False, context_fn=contexts
    )


def _replay(policy: Policy) -> Way:
    return lambda block: partial(
        mb.checkpoint, block, engine="replay", keep=policy, verify=False
    )


def has_torch_remat() -> bool:
    """Say whether `torch_remat` can be imported."""
    return find_spec("torch_remat") is not None


class _Stream:
    """Hand the state of torch's generator to torch_remat, as its manual shows."""

    def snapshot(self) -> Tensor:
        """Return the state."""
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        """Set the state."""
        torch.set_rng_state(state)


def _torch_remat(block: nn.Module) -> Run:
    """Save what multiplies matrices, recompute the rest.

    torch_remat skips a region that is saved, so what the code after it reads must be
    kept as well; that is each of these outputs, as with torch's policy.
    """
    import torch_remat

    for name, module in block.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | Attend):
            region = torch_remat.region(module.forward, name, recompute=False)
            module.forward = partial(_kept_output, region)  # type: ignore[method-assign]
    draws = any(isinstance(module, nn.Dropout) for module in block.modules())
    checkpointed: Run = torch_remat.checkpoint(
        recompute_state_hooks=(_Stream(),) if draws else ()
    )(block)
    return checkpointed


def _kept_output(region: Callable[..., Tensor], *args: Tensor) -> Tensor:
    import torch_remat

    output = region(*args)
    torch_remat.recompute_needs_tensor(output)
    return output
