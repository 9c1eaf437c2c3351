"""Bind the recorder in C++ to the classes of the tape, and create frames.

The first region that replays decides which recorder serves the process.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch.nn import Parameter

from membudget._torch import hide_from_dynamo
from membudget._torch_accelerator import current_stream
from membudget._torch_observing import SHARED, observe_operators, operator_of
from membudget.engine import isolation, native
from membudget.engine.controls import SWITCHES
from membudget.engine.groups import OPEN_GROUPS
from membudget.engine.messages import module_path_in, weakly
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.replay.aliasing import AS_STRIDED, EMPTY, Tracker
from membudget.engine.replay.checks import Checks
from membudget.engine.replay.extension import EXTENSION
from membudget.engine.replay.following import (
    end_trip,
    realign,
    routes_of,
    set_out,
)
from membudget.engine.replay.forward_record import ForwardRecord
from membudget.engine.replay.frame import ReplayFrame
from membudget.engine.replay.living import LiveStorage, LiveTensor, RecordedMemory
from membudget.engine.replay.native_replayer import NativeReplayer
from membudget.engine.replay.recorder import Recorder
from membudget.engine.replay.replayer import FIRST_TASK, Replayer
from membudget.engine.replay.routes import Routes
from membudget.engine.replay.shared_memory import share
from membudget.engine.replay.tape import Operation, ReplayHandle, TapeValue
from membudget.engine.replay.verified import (
    MAX_DEPTH,
    VERIFIED,
    Verified,
    key_of,
    verified,
)
from membudget.engine.rerun_extension import bind_rerun
from membudget.engine.sampling import Sampling
from membudget.engine.stages import CallStages
from membudget.engine.surroundings import operator_conditions
from membudget.observer import OBSERVERS, accelerate, observed
from membudget.ops import OperatorFacts, facts_of
from membudget.scope import Scope
from membudget.state.bits import is_subclass
from membudget.state.copies import copy_of

_IS_DECIDED: list[bool] = []


def replay_frame(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    statistics: Statistics | None,
) -> ReplayFrame:
    """Create the frame of one call of a replay region."""
    if not _IS_DECIDED:
        _IS_DECIDED.append(True)
        if native.is_wanted():
            serve()
    if statistics is not None:
        statistics.has_replayed = True
    make = EXTENSION[0].replay_frame if EXTENSION else ReplayFrame
    frame: ReplayFrame = make(function, args, kwargs, options, statistics)
    return frame


def serve() -> bool:
    """Let the recorder in C++ serve from now on; return whether it is to be had."""
    extension = native.extension()
    if extension is None:
        return False
    if not EXTENSION:
        bind_rerun()
        names = {item.__name__: item for item in _BOUND}
        extension.bind(SimpleNamespace(**names, **_NAMED))
        for function in _CALLED:
            hide_from_dynamo(function)
        accelerate(extension.watch, extension.cover)
        EXTENSION.append(extension)
    return True


# What the extension calls.


def find_operator(name: str, overload: str) -> tuple[Any, Any, str, tuple[int, ...]]:
    """Return an operator, its facts, its kind and the positions of its tensors."""
    operator = operator_of(f"{name}.{overload}" if overload else name)
    facts = facts_of(operator)
    assert facts is not None, "the dispatcher does not know higher-order operators"
    arguments = operator._schema.arguments
    tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    return operator, facts, _kind(operator, facts), tuple(tensors)


def _kind(operator: Any, facts: OperatorFacts) -> str:
    """Return how the extension records an operator; `other` is left to Python."""
    if operator._schema.name in _RESHAPES:
        return "reshape"
    is_special = (
        facts.is_query
        or not facts.is_numbered
        or facts.written_names
        or facts.is_opaque
        or facts.is_foreign
    )
    if is_special:
        return "other"
    if facts.statistics:
        is_usual = operator._schema.name in _NORMALISATIONS and not facts.written
        return "normalisation" if is_usual else "other"
    if facts.is_constant:
        return "constant"
    if facts.is_plain_view:
        return "view"
    writes_first = facts.written == (0,) and 0 in facts.tensors  # No list of tensors.
    if writes_first and not (facts.returns_fresh or facts.has_tensor_keywords):
        return "in_place"
    if facts.is_empty:
        return "empty"
    return "other" if facts.is_view or facts.written else "fresh"


# They change the geometry of their argument: its memory is held from then on.
_RESHAPES = (
    *("aten::as_strided_", "aten::squeeze_", "aten::swapaxes_", "aten::t_"),
    *("aten::transpose_", "aten::unsqueeze_"),
)

# Their running statistics are arguments 3 and 4, and argument 5 says whether it trains.
_NORMALISATIONS = ("aten::native_batch_norm", "aten::cudnn_batch_norm")

_BOUND: tuple[Any, ...] = (
    *(Checks, ForwardRecord, LiveStorage, LiveTensor, Operation, RecordedMemory),
    *(Recorder, ReplayFrame, ReplayHandle, Replayer, Scope, TapeValue, Tracker),
    *(Parameter, copy_of, end_trip, find_operator, realign, share),
    *(CallStages, NativeReplayer, Sampling, Verified, current_stream),
    *(Routes, is_subclass, module_path_in, observe_operators, operator_conditions),
    *(routes_of, set_out, verified, weakly),
)
_NAMED: dict[str, Any] = {
    "AS_STRIDED": AS_STRIDED,
    "EMPTY": EMPTY,
    "FIRST_TASK": FIRST_TASK,
    "MAX_DEPTH": MAX_DEPTH,
    "OBSERVERS": OBSERVERS,
    "OPEN_GROUPS": OPEN_GROUPS,
    "OPERATOR_LOCK": isolation.OPERATOR_LOCK,
    "SHARED": SHARED,
    "SWITCHES": SWITCHES,
    "VERIFIED": VERIFIED,
    "key_of": key_of,
    "observed": observed,
}

# In a thread that is compiling, a Python function called from C++ would be traced.
_CALLED: tuple[Any, ...] = (
    *(ForwardRecord.advance, ForwardRecord.align, ForwardRecord.asks),
    *(ForwardRecord.decided, ForwardRecord.hold, ForwardRecord.note_outputs),
    Routes.survey,
    *(Operation.inputs, Recorder.note_empty),
    *(CallStages.held_in, CallStages.is_current, CallStages.put),
    *(end_trip, realign, ReplayFrame.note_run),
    *(ReplayFrame.explained, Replayer._lent, Replayer._may_overwrite, Replayer._run),
    *(Replayer._source, Replayer.release, Tracker.before_write, share),
    *(Scope.__exit__, Scope.callback, Tracker.mark_read, Tracker.meet),
    *(find_operator, isolation.enter, isolation.leave),
)
