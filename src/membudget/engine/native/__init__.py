"""The recorder and the hooks in C++, an optional accelerator of both engines.

The extension does what the Python recorder does, on the same objects: it makes and
changes the instances of the Python classes of the tape, through the offsets of their
`__slots__`. It covers only what most operators need, and hands every other call to the
Python code, so that each rule of the engine has one home.

    python.h      Python objects in C++         operators.h  facts of an operator
    tape.h        the classes of the tape       kernel.h     the dispatcher's entrance
    call.h        arguments as they were passed recorder.h   Recorder.observe
    tracking.h    Tracker                       record.h, observe.h, write.h, draws.h
    replay.h      plans                         hooks.h      saved-tensor hooks
    execute.h     operators run again           sums.h       fingerprints
    module.cpp    what Python sees              box.h        C++ objects for Python

Of calls that write no tape, as their operators read what they read before:

    route.h       what was read and saved   survey.h     a route is drawn up
    trip.h        a call on a route         follow.h     operators are compared with it
    plan.h        what a replay needs       revisit.h    replays from it
    leave.h, writer.h  the tape is written

Of rerun regions:

    regions.h     the classes of the engine     binding.h    where their attributes are
    rerun.h       hooks that drop and fill      unpack.h     the hook that recomputes
    again.h       a recompute                   forward.h    a call
    begin.h       what a call notes             history.h    calls like it
    generators.h, settings.h  what is unchanged reach.h, reads.h  what modules hold

Replay regions use it where it has been built, or a compiler is found; rerun regions
where it has been built. `MEMBUDGET_NATIVE=0` turns it off, `python -m membudget native`
builds it ahead.

Rejected: classes of the tape in C++, with Python methods for the rare cases. Each rule
    would then be written once for either recorder.
"""

from __future__ import annotations

import os
from typing import Any

from membudget.engine.native.library import RECORDER, NoExtensionError
from membudget.state.bits import accelerate

RERUN: list[Any] = []
"""The extension module, once it has been bound to the classes of the rerun engine."""

_LOADED: list[Any] = []
_SOUGHT: list[bool] = []
_WHY_NOT: list[str] = []


def is_wanted() -> bool:
    """Return whether the recorder in C++ is not turned off."""
    return os.environ.get("MEMBUDGET_NATIVE", "1") != "0"


def is_available() -> bool:
    """Return whether regions use the recorder in C++, or will once they replay."""
    return is_wanted() and (bool(_LOADED) or not (_WHY_NOT or RECORDER.why_not()))


def extension() -> Any:
    """Return the extension module, built if necessary; `None` if it cannot be had."""
    if not _LOADED and not _WHY_NOT:
        try:
            _LOADED.append(RECORDER.imported("_recorder"))
            accelerate(_LOADED[0].sums)
        except (NoExtensionError, ImportError) as error:
            _WHY_NOT.append(str(error))
    return _LOADED[0] if _LOADED else None


def built_extension() -> Any:
    """Return the extension module if it was built before; `None` otherwise."""
    if not _LOADED and not _SOUGHT:
        _SOUGHT.append(True)
        if is_wanted() and RECORDER.find() is not None:
            extension()
    return _LOADED[0] if _LOADED else None


def status() -> str:
    """Return which recorder serves, as text for a person."""
    if not is_wanted():
        return "Python (MEMBUDGET_NATIVE=0)"
    if _LOADED:
        return "C++"
    if not is_available():
        return f"Python; of the one in C++: {[*_WHY_NOT, RECORDER.why_not()][0]}"
    return (
        "C++"
        if RECORDER.find() is not None
        else "C++, which the first replay region builds"
    )
