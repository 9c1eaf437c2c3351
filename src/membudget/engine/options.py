"""The options of a region, validated when they are given, and its counters."""

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
            which raise errors; it exists for code that asks for it.
        context_fn: Returns two context managers, one for the forward and one for each
            recompute, as selective checkpointing does.
        determinism_check: What to compare of a recomputed tensor and the saved one:
            `"default"` shape, dtype, device and stride, and in verified calls a
            fingerprint of the bytes; `"values"` the fingerprint in every call; `"none"`
            nothing.
        debug: Record the operators of both runs, for the message of a mismatch.
        early_stop: End a recompute once the last tensor that is needed is computed.
        preserve_rng_state: Draw the forward's random numbers in a recompute.
        guards: Restore and check everything that the function can reach besides its
            arguments: buffers, parameters, closed-over tensors, private generators,
            Python's and NumPy's random streams, modes, context variables, process-wide
            settings, training flags. `False` leaves the guarantees of torch's own
            checkpoint: autocast, unchanged arguments, and the random streams of the CPU
            and of the arguments' devices, with regions in one thread at a time.
        engine: How a dropped tensor is recomputed: `"rerun"` runs the function again,
            `"replay"` re-runs the recorded operators that are needed. `"auto"` is
            rerun, which costs nothing per operator, unless `keep` is given or the
            second run would repeat effects that have to be undone (running statistics
            in training, private generators).
        keep: What a replay region keeps: a policy from `membudget.policies`, glob
            patterns for names of submodules, or a function of a candidate.
        verify: Whether to verify the first call of each signature; for a rerun, see
            Rule 12 of `region`. A replay compares each recomputed tensor with the
            dropped one. With `True`, the originals stay in memory until the forward
            ends and each is replayed; one that does not reproduce bit for bit is kept
            from then on, so that this step is exact, too. With `"fingerprints"`, only
            fingerprints stay, which take next to no memory. The backward compares them
            and raises `RecomputeMismatchError` on a difference; run the step again,
            which then keeps the tensors at fault. `"always"` compares fingerprints in
            every step, for kernels that are not reproducible from run to run: it reads
            each dropped byte twice more.
        strict: Whether a replay region raises where plain autograd would, because a
            saved tensor was overwritten before the backward. Otherwise the gradient is
            computed from the values that were saved, and an `OverwrittenWarning` says
            so once.
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
    """The policy that `keep` describes; derived."""

    decisions: dict[Any, bool | None] = field(init=False, repr=False, compare=False)
    """The policy's decisions by operator alone, cached."""

    verifies: bool = field(init=False, repr=False, compare=False)
    """Whether a rerun verifies the first call of a signature; derived."""

    always_replays: bool = field(init=False, repr=False, compare=False)
    """Whether the engine is replay, whatever the region reaches; derived."""

    may_replay: bool = field(init=False, repr=False, compare=False)
    """Whether the engine is replay if a rerun would repeat effects; derived."""

    is_instrumented: bool = field(init=False, repr=False, compare=False)
    """Whether a forward needs more than hooks; derived, and read by every region."""

    def __post_init__(self) -> None:
        """Reject invalid values, and derive the rest."""
        self._check()
        is_auto, check = self.engine == "auto", self.determinism_check
        derived = {
            "policy": as_policy(self.keep),
            "decisions": {},
            "always_replays": self.engine == "replay"
            or (is_auto and self.keep is not None),
            "verifies": self.guards
            and bool(self.verify)
            and check != "none"
            and self.preserve_rng_state,
            # An option that only rerun has selects rerun.
            "may_replay": is_auto
            and check == "default"
            and self.early_stop
            and self.preserve_rng_state
            and not (self.use_reentrant or self.context_fn or self.debug),
            "is_instrumented": self.context_fn is not None
            or self.debug
            or check == "values",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

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
                "keep needs the replay engine, because a rerun keeps nothing inside a "
                "region: omit engine and use_reentrant"
            )
        if self.engine == "replay" and (self.context_fn or self.use_reentrant):
            raise OptionError(
                "engine='replay' supports neither context_fn nor use_reentrant; pass a "
                "policy as keep="
            )
        if self.context_fn is not None and not callable(self.context_fn):
            raise OptionError(
                "context_fn must be a function that returns two context managers; got "
                f"{self.context_fn!r}"
            )
        if self.use_reentrant and (self.context_fn is not None or self.debug):
            raise OptionError(
                "use_reentrant=True supports neither context_fn nor debug: omit it to "
                "use the default engine, which supports both"
            )


OPTION_NAMES = frozenset(f.name for f in fields(RegionOptions) if f.init)

DEFAULTS = RegionOptions()


def take_options(kwargs: dict[str, Any]) -> RegionOptions:
    """Remove a region's options from the keywords of a call; return them validated."""
    names = OPTION_NAMES & kwargs.keys() if kwargs else None
    if not names:
        return DEFAULTS
    given = {name: kwargs.pop(name) for name in names}
    try:
        return _remembered(**given)
    except TypeError:  # An unhashable value.
        return RegionOptions(**given)


# A call site passes the same options each time, and validating them takes 3 µs.
_remembered = lru_cache(maxsize=256, typed=True)(RegionOptions)


def checked_options(options: Mapping[str, Any]) -> RegionOptions:
    """Return options given by name; reject unknown names."""
    unknown = options.keys() - OPTION_NAMES
    if unknown:
        raise OptionError(
            f"unknown option {', '.join(map(repr, sorted(unknown)))}; a region has "
            f"{', '.join(sorted(OPTION_NAMES))}"
        )
    return RegionOptions(**options)


class Statistics:
    """Counters over all calls of one region, for `status()`.

    Attributes:
        label: The region's name, which errors use, too.
        forwards: Calls that dropped saved tensors.
        skipped: Calls in which nothing required a gradient.
        recomputes: How often dropped tensors were recomputed.
        unrepeatable: Outputs that a replay region keeps because replaying them was not
            bitwise equal.
    """

    __slots__ = ("forwards", "label", "recomputes", "skipped", "unrepeatable")

    def __init__(self, label: str = ""):
        """Start at zero."""
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
