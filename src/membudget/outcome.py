"""Compare what a step computes under its plan with what the plain step computes.

The regions of a plan compare recomputed values with those that they dropped, which says
nothing of what is computed differently while a region records. So `fit` compares the
whole step once, by fingerprints, from one state and with the same random numbers.
"""

from __future__ import annotations

from torch import Tensor

from membudget.engine.controls import disable_checkpointing
from membudget.errors import RecomputeMismatchError
from membudget.profile.profiling import state_kept
from membudget.state.bits import Fingerprint, content_of
from membudget.step import Step

Prints = dict[str, Fingerprint | None]


def check_against_plain(step: Step) -> None:
    """Run the step under its plan and plain, and compare loss, gradients and buffers.

    What two plain steps compute differently is not compared.

    Raises:
        RecomputeMismatchError: If anything differs; the error names it.
    """
    planned = _outcome(step)
    with disable_checkpointing():
        plain = _outcome(step)
        found = [name for name in plain if planned.get(name) != plain[name]]
        again = _outcome(step) if found else plain
    wrong = [name for name in found if again[name] == plain[name]]
    if wrong:
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        raise RecomputeMismatchError(
            f"under the plan, {wrong[0]}{more} differs from the plain step, whose two "
            "runs are equal. Please report this; until then, leave out the block at "
            "fault: membudget.audit names every difference"
        )


def _outcome(step: Step) -> Prints:
    """Run the step once; return fingerprints of all it computes, by name."""
    with state_kept(step, has_values=True):
        step.prepare()
        loss = step.run()
        found = {"the loss": _print(loss)} if isinstance(loss, Tensor) else {}
        for name, parameter in step.model.named_parameters():
            found[f"the gradient of {name!r}"] = _print(parameter.grad)
        for name, tensor in step.batch_tensors().items():
            if tensor.is_leaf:
                found[f"the gradient of {name}"] = _print(tensor.grad)
        for name, buffer in step.model.named_buffers():
            found[f"the buffer {name!r}"] = _print(buffer)
        return found


def _print(tensor: Tensor | None) -> Fingerprint | None:
    return None if tensor is None else content_of(tensor.detach())
