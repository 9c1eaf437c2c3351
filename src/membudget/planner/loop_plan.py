"""What a training loop taught, as a part of a plan file: its situations and recordings.

The situations are for people to read. Recordings and schedules are tables of thousands
of operators, so they are packed: compressed JSON, as text.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from membudget.errors import PlanError


@dataclass(frozen=True)
class SituationPlan:
    """One situation of a training loop, under the plan that was last in force.

    Attributes:
        kind: Digest of all that tells situations apart but sizes.
        sizes: Lengths of all dimensions of the tensors that the model was called with.
        tensors: Their shapes as text, such as `"8x128"`.
        uses: How many micro-batches ran.
        wanted_bytes: Bytes for which the plan was made.
        peak_bytes: Predicted peak of the plan.
        slowdown: Predicted slowdown of the plan.
        expected_bytes: What was expected of it when it fit last; 0 if it never did.
        took_bytes: Largest measured peak under it; 0 if none was measured.
        correction_bytes: What micro-batches took beyond all predictions, at most.
        schedule: Number of the plan's schedule among the learned ones of its kind; -1
            if there is none.
    """

    kind: str
    sizes: tuple[int, ...]
    tensors: str
    uses: int
    wanted_bytes: int
    peak_bytes: int
    slowdown: float
    expected_bytes: int
    took_bytes: int
    correction_bytes: int
    schedule: int


@dataclass(frozen=True)
class LoopPlan:
    """What a training loop taught of one model.

    Attributes:
        model: Class name of the model.
        parameters: Parameters of the model, as in a plan.
        device: Type of the model's device, such as `"cpu"`.
        torch: Version of torch.
        conditions: Digest of what else decides the operators that run: the model's
            code and attributes, the optimizer's options, torch's settings, the machine.
        situations: The situations, in the order in which they came.
        learned: Recordings, schedules, and what the loop needs beside the model; packed
            by `pack`.
    """

    model: str
    parameters: tuple[str, ...]
    device: str
    torch: str
    conditions: str
    situations: tuple[SituationPlan, ...]
    learned: str


def pack(data: Any) -> str:
    """Return plain data as one short line of text.

    Example:
        >>> unpack(pack({"sizes": [1, 2]}))
        {'sizes': [1, 2]}
    """
    return b64encode(zlib.compress(json.dumps(data).encode())).decode()


def unpack(text: str) -> Any:
    """Return the data that `pack` was given.

    Raises:
        PlanError: If the text was changed or is not whole.
    """
    try:
        return json.loads(zlib.decompress(b64decode(text, validate=True)))
    except (ValueError, RecursionError, zlib.error) as error:
        raise PlanError(f"what the plan learned is not whole: {error}") from error
