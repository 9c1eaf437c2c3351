"""Bind the extension in C++ to the classes of the rerun engine, and create frames."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import Module, Parameter

from membudget import _torch_settings
from membudget._torch import hide_from_dynamo
from membudget.callsite import fills_what_it_saved
from membudget.engine import isolation, native
from membudget.engine.arguments import FIRST, HeldArguments
from membudget.engine.calls import Calls, Owner
from membudget.engine.controls import RECOMPUTING
from membudget.engine.families import INERT
from membudget.engine.groups import BY_BACKWARD, OPEN_GROUPS, release_in_time
from membudget.engine.held import HeldTensor
from membudget.engine.native import RERUN
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.reach import NOTHING, VISITORS, Reached, reach
from membudget.engine.reads import Reads
from membudget.engine.recording import Recording, RerunHandle
from membudget.engine.rerun import Rerun, StopRecompute, as_it_is
from membudget.engine.rerun_frame import RerunFrame
from membudget.engine.slots import (
    ATTRIBUTES,
    CODE_SLOTS,
    MAX_DEPTH,
    attribute_names,
    class_slots,
)
from membudget.engine.surroundings import Ambient, Surroundings
from membudget.scope import Scope
from membudget.state.autocast import Autocast, autocast_state
from membudget.state.identity import address_of, version_of
from membudget.state.rng import (
    Source,
    Sources,
    bring_all_back,
    global_sources,
    torch_sources,
)

_CLASSES: tuple[Any, ...] = (
    *(Ambient, Autocast, Calls, HeldArguments, HeldTensor, Module, Owner, Parameter),
    *(Reached, Reads, RegionOptions, Rerun, RerunFrame, RerunHandle, Scope, Source),
    *(Statistics, StopRecompute, Surroundings),
)

_FUNCTIONS: tuple[Any, ...] = (
    *(address_of, as_it_is, attribute_names, autocast_state, bring_all_back),
    *(class_slots, fills_what_it_saved, global_sources, isolation.enter),
    *(isolation.is_shared, isolation.leave, reach, release_in_time, torch_sources),
    version_of,
)

_HIDDEN: tuple[Any, ...] = (
    *(Recording.pack, Rerun._check_end, Rerun._check_external, Rerun._judge),
    *(Rerun._pack, RerunFrame._give_up, RerunFrame._missing, RerunFrame._unpack),
    *(Sources.note, Surroundings.enter_ambient, Surroundings.enter_state),
    *(bring_all_back, fills_what_it_saved, isolation.enter, isolation.is_shared),
    *(isolation.leave, release_in_time),
)


def new_frame(*given: Any) -> RerunFrame:
    """Return `RerunFrame(*given)`, made in C++ where that has been built."""
    extension = RERUN[0] if RERUN else bind_rerun()
    make = RerunFrame if extension is None else extension.begun
    frame: RerunFrame = make(*given)
    return frame


def bind_rerun() -> Any:
    """Bind the extension to the classes of this engine, if there is one."""
    extension = native.built_extension()
    if extension is not None:
        extension.bind_rerun(_names())
        # In a thread that is compiling, a function called from C++ would be traced.
        for function in _HIDDEN:
            hide_from_dynamo(function)
        RERUN.append(extension)
    return extension


def _names() -> SimpleNamespace:
    """Return what the extension calls, compares with, and makes instances of."""
    return SimpleNamespace(
        **{item.__name__: item for item in (*_CLASSES, *_FUNCTIONS)},
        ATTRIBUTES=ATTRIBUTES,
        BY_BACKWARD=BY_BACKWARD,
        CODE_SLOTS=CODE_SLOTS,
        EINSUM=_torch_settings.EINSUM,
        FIRST=FIRST,
        INERT=INERT,
        Lock=isolation.Lock,
        MAX_DEPTH=MAX_DEPTH,
        MHA=_torch_settings.MHA,
        NOTHING=NOTHING,
        OPEN_GROUPS=OPEN_GROUPS,
        RECOMPUTING=RECOMPUTING,
        REGISTRY=isolation.REGISTRY,
        VISITORS=VISITORS,
        forward_ad=forward_ad,
        has_cuda_settings=torch.backends.cuda.is_built(),
        module_visitor=Reached._module,
        modules=sys.modules,
        read_settings=_torch_settings.read,
    )
