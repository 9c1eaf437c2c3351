"""The options of a region, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, get_args

from membudget.engine.policy import Policy, as_policy
from membudget.errors import OptionError

DeterminismCheck = Literal["default", "values", "none"]

Engine = Literal["auto", "rerun", "replay"]

Verify = bool | Literal["fingerprints", "always"]

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """How one region is run and recomputed.

    Attributes:
        use_reentrant: Use the classic variant, an `autograd.Function`. It has limits,
            which are errors; it is here for code that asks for it.
        context_fn: Returns two context managers, one for the forward and one for each
            recompute: selective checkpointing comes in this way.
        determinism_check: What of a recomputed tensor is compared with the saved one:
            `"default"` shape, dtype, device and stride, and in the calls that are
            verified a fingerprint of its bytes; `"values"` the fingerprint always;
            `"none"` nothing.
        debug: Note the operators of both runs, for the message of a mismatch.
        early_stop: End a recompute once the last tensor that is needed is made.
        preserve_rng_state: Let a recompute draw the random numbers of the forward.
        guards: Repair and check whatever the function can reach besides its arguments:
            buffers, parameters, closed-over tensors, private generators, Python's and
            NumPy's random streams, modes, context variables, process-wide settings,
            training flags. `False` leaves what torch's own checkpoint promises: the
            random streams of the CPU and the arguments' devices, in one thread at a
            time, autocast, and arguments that did not change.
        engine: How a dropped tensor is made again: `"rerun"` runs the function again,
            `"replay"` the operators that are needed, which were recorded. `"auto"` is
            rerun, which costs nothing for each operator, except where a rerun would
            have to repair what its second run does again (running statistics in
            training, private generators), or where `keep` is given.
        keep: What a replay region keeps: a policy of `membudget.policies`, globs on
            names of submodules, or a function of a candidate.
        verify: Whether the first call of each signature is verified; see Rule 12 of
            `region` for a rerun. A replay compares what it makes again with what it
            dropped. With `True` the originals stay
            until the forward ends, and each is replayed beside them; what does not come
            back bit for bit is kept from then on, and this step is right, too. With
            `"fingerprints"` only those stay, which take next to no memory; they are
            compared in the backward, which raises `RecomputeMismatchError` if one
            differs: the step must be run again, and what differed is kept by then.
            With `"always"` every step does so, for kernels that are not reproducible
            from run to run: each dropped byte is read twice more.
        strict: Whether a replay region raises where plain autograd would, because a
            saved tensor was written before the backward. Without it, the gradient is
            that of what was saved, and an `OverwrittenWarning` says so the first time.
    """

    use_reentrant: bool = False
    context_fn: Callable[[], ContextPair] | None = None
    determinism_check: DeterminismCheck = "default"
    debug: bool = False
    early_stop: bool = True
    preserve_rng_state: bool = True
    guards: bool = True
    engine: Engine = "auto"
    keep: Any = None
    verify: Verify = True
    strict: bool = False

    policy: Policy = field(init=False, repr=False, compare=False)
    """What `keep` means; derived."""

    decisions: dict[Any, bool | None] = field(init=False, repr=False, compare=False)
    """What the policy decides by the operator alone, as far as it was asked."""

    verifies: bool = field(init=False, repr=False, compare=False)
    """Whether a rerun is verified in the first call of a signature; derived."""

    always_replays: bool = field(init=False, repr=False, compare=False)
    """Whether the engine is replay, whatever the region reads; derived."""

    may_replay: bool = field(init=False, repr=False, compare=False)
    """Whether it is replay where a rerun would have to repair; derived."""

    is_instrumented: bool = field(init=False, repr=False, compare=False)
    """Whether a forward needs more than hooks; derived, and read by every region."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self._check()
        object.__setattr__(self, "policy", as_policy(self.keep))
        object.__setattr__(self, "decisions", {})
        always = self.engine == "replay" or (
            self.engine == "auto" and self.keep is not None
        )
        object.__setattr__(self, "always_replays", always)
        verifies = (
            self.guards
            and bool(self.verify)
            and self.determinism_check != "none"
            and self.preserve_rng_state
        )
        object.__setattr__(self, "verifies", verifies)
        # Whoever asks something of a rerun gets one.
        may = (
            self.engine == "auto"
            and self.determinism_check == "default"
            and self.early_stop
            and self.preserve_rng_state
            and not (self.use_reentrant or self.context_fn or self.debug)
        )
        object.__setattr__(self, "may_replay", may)
        instrumented = (
            self.context_fn is not None
            or self.debug
            or self.determinism_check == "values"
        )
        object.__setattr__(self, "is_instrumented", instrumented)

    def _check(self) -> None:
        if self.determinism_check not in get_args(DeterminismCheck):
            raise OptionError(
                "determinism_check must be one of 'default', 'values' and 'none'; got "
                f"{self.determinism_check!r}"
            )
        if self.engine not in get_args(Engine):
            raise OptionError(
                "engine must be one of 'auto', 'rerun' and 'replay'; got "
                f"{self.engine!r}"
            )
        if self.verify not in (True, False, "fingerprints", "always"):
            raise OptionError(
                "verify must be True, False, 'fingerprints' or 'always'; got "
                f"{self.verify!r}"
            )
        if self.keep is not None and (self.engine == "rerun" or self.use_reentrant):
            raise OptionError(
                "keep is the replay engine's: a rerun keeps nothing inside of a "
                "region. Leave engine and use_reentrant out."
            )
        if self.engine == "replay" and (self.context_fn or self.use_reentrant):
            raise OptionError(
                "engine='replay' has neither context_fn nor use_reentrant; give a "
                "policy by keep="
            )
        if self.context_fn is not None and not callable(self.context_fn):
            raise OptionError(
                "context_fn must be a function that returns two context managers; got "
                f"{self.context_fn!r}"
            )
        if self.use_reentrant and (self.context_fn is not None or self.debug):
            raise OptionError(
                "use_reentrant=True has neither context_fn nor debug: leave it out to "
                "use the default engine, which has both"
            )


OPTION_NAMES = frozenset(f.name for f in fields(RegionOptions) if f.init)

DEFAULTS = RegionOptions()


def take_options(kwargs: dict[str, Any]) -> RegionOptions:
    """Take the options of a region out of the keywords of a call.

    Args:
        kwargs: The keywords; what is an option is removed.

    Returns:
        The options, checked.
    """
    names = OPTION_NAMES & kwargs.keys() if kwargs else None
    if not names:
        return DEFAULTS
    given = {name: kwargs.pop(name) for name in names}
    try:
        return _remembered(**given)
    except TypeError:  # A value that cannot be hashed.
        return RegionOptions(**given)


# A call site gives the same options each time, and checking them costs 3 µs.
_remembered = lru_cache(maxsize=256, typed=True)(RegionOptions)


def checked_options(options: Mapping[str, Any]) -> RegionOptions:
    """Return options given by name, refusing names that are none."""
    unknown = options.keys() - OPTION_NAMES
    if unknown:
        raise OptionError(
            f"unknown option {', '.join(map(repr, sorted(unknown)))}; a region has "
            f"{', '.join(sorted(OPTION_NAMES))}"
        )
    return RegionOptions(**options)


class Statistics:
    """Counts over all the calls of one region.

    Attributes:
        label: The region's name, which errors use, too.
        forwards: Calls that dropped saved tensors.
        skipped: Calls in which nothing needed a gradient.
        recomputes: Times that dropped tensors were made again.
        unrepeatable: Outputs kept because replaying them gave other bits.
    """

    __slots__ = ("forwards", "label", "recomputes", "skipped", "unrepeatable")

    def __init__(self, label: str = ""):
        """Begin at zero."""
        self.label = label
        self.forwards = 0
        self.skipped = 0
        self.recomputes = 0
        self.unrepeatable = 0

    def count_call(self, has_saved: bool) -> None:
        """Count a call of the region."""
        if has_saved:
            self.forwards += 1
        else:
            self.skipped += 1
