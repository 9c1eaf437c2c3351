"""Options of a region, validated on creation, and counters of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import FunctionType
from typing import Any, Literal, get_args

from membudget.engine.candidate import Answer
from membudget.engine.elsewhere import may_offload
from membudget.engine.policy import Policy, Predicate, as_policy
from membudget.errors import OptionError
from membudget.offload import Offload

DeterminismCheck = Literal["default", "values", "none"]

Engine = Literal["auto", "rerun", "replay"]

Verify = bool | float | Literal["fingerprints", "always"]

_VERIFY_WORDS = (True, False, "fingerprints", "always")

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """Options for running and recomputing one region.

    Attributes:
        use_reentrant: Use the classic variant, an `autograd.Function`, which exists for
            compatibility; violating one of its restrictions raises an error.
        context_fn: A function that returns two context managers, one for the forward
            and one for each recompute, as in selective checkpointing.
        determinism_check: How to compare recomputed with saved tensors: `"default"`
            compares shape, dtype, device and stride, and in verified calls also a
            fingerprint of the bytes; `"values"` compares fingerprints in every call;
            `"none"` compares nothing.
        debug: Record the operators of forward and recompute for mismatch errors.
        early_stop: End a recompute once the last needed tensor is available.
        preserve_rng_state: Reproduce the forward's random numbers in each recompute.
        guards: Restore and check, besides arguments, everything the function can reach:
            buffers, parameters, closed-over tensors, user-created generators, Python's
            and NumPy's random streams, modes, context variables, process-wide settings,
            training flags. `guards=False` reduces the guarantees to those of torch's
            `checkpoint`: autocast, unchanged arguments, and random streams of the CPU
            and the arguments' devices, provided that only one thread runs regions.
        engine: How dropped tensors are recomputed: `"rerun"` runs the function again,
            `"replay"` re-runs only the recorded operators that are needed. `"auto"`
            selects `"rerun"`, which has no overhead per operator, unless `keep` is
            given or a second run would repeat side effects that must be undone (running
            statistics in training, draws from user-created generators).
        keep: Which outputs a replay region keeps: a policy from `membudget.policies`,
            glob patterns for submodule names, or a predicate on a `Candidate`.
        verify: Whether to verify the first call with each signature (for the rerun
            engine, see Rule 12 in `region`). The replay engine compares each recomputed
            tensor with the dropped one. With `verify=True`, the original tensors stay
            in memory until the forward has ended and all of them have been replayed;
            tensors not reproduced bit for bit are kept from then on, so that the
            current step is exact as well. `verify="fingerprints"` retains only
            fingerprints, which take almost no memory; the backward pass compares them
            and raises `RecomputeMismatchError` on a difference. After a mismatch, run
            the step a second time: the tensors at fault are then kept. Only with
            `verify=True` are reruns verified anew at the 2nd, 4th, 8th, ... call.
            `verify="always"` compares fingerprints in every step, for kernels that are
            not reproducible; each dropped byte is then read two more times. A share
            such as `verify=0.01` compares fingerprints in that share of all calls; of
            calls that differ in numbers and the sizes of tensors alone, otherwise only
            the 1st, 2nd, 4th, 8th, ... is verified.
        offload: Holds the region's inputs in host memory, whichever engine recomputes;
            made by `membudget.offload`. What `keep` keeps stays on the device; to
            offload that as well, see `policies.offloaded`.
        strict: Whether a replay region raises where plain autograd would, because a
            saved tensor was overwritten before the backward pass. Without `strict`,
            gradients use the values as saved, and one `OverwrittenWarning` is issued.
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
    offload: Offload | None = None

    policy: Policy = field(init=False, repr=False, compare=False)
    """The policy described by `keep`; derived."""

    decisions: dict[Any, Answer | None] = field(init=False, repr=False, compare=False)
    """The policy's decisions by operator alone, cached."""

    verifies: bool = field(init=False, repr=False, compare=False)
    """Whether a rerun verifies the first call of a signature; derived."""

    always_replays: bool = field(init=False, repr=False, compare=False)
    """Whether to replay regardless of what the region can reach; derived."""

    may_replay: bool = field(init=False, repr=False, compare=False)
    """Whether to replay if a rerun would repeat side effects; derived."""

    may_follow: bool = field(init=False, repr=False, compare=False)
    """Whether calls of a replay region may follow routes; derived."""

    is_instrumented: bool = field(init=False, repr=False, compare=False)
    """Whether a forward needs more than saved-tensor hooks; derived."""

    @property
    def share(self) -> float | None:
        """The share of calls that `verify` asks for, if it does."""
        asked = self.verify
        return asked if type(asked) is float and 0 < asked <= 1 else None

    def __post_init__(self) -> None:
        """Validate the options, and compute the derived fields."""
        self._check()
        is_auto, check = self.engine == "auto", self.determinism_check
        policy = as_policy(self.keep)
        derived = {
            "policy": policy,
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
            "may_follow": not may_offload(policy),
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
        is_word = type(self.verify) is not float and self.verify in _VERIFY_WORDS
        if self.share is None and not is_word:
            raise OptionError(
                "verify must be True, False, 'fingerprints', 'always' or a share of "
                f"all calls such as 0.01; got {self.verify!r}"
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
        self._check_offload()
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

    def _check_offload(self) -> None:
        if self.offload is not None and (
            self.use_reentrant or not isinstance(self.offload, Offload)
        ):
            raise OptionError(
                "offload must be made by membudget.offload(host=...), and needs the "
                f"default engine, without use_reentrant; got {self.offload!r}"
            )


OPTION_NAMES = frozenset(f.name for f in fields(RegionOptions) if f.init)

DEFAULTS = RegionOptions()


def take_options(kwargs: dict[str, Any]) -> RegionOptions:
    """Pop the region options from a call's keyword arguments, and validate them."""
    names = OPTION_NAMES & kwargs.keys() if kwargs else None
    if not names:
        return DEFAULTS
    given = {name: kwargs.pop(name) for name in names}
    keep = given.get("keep")
    if "offload" in given or (isinstance(keep, Policy) and may_offload(keep)):
        return RegionOptions(**given)  # Remembered, they would keep the host memory.
    if not all(map(_holds_nothing, given.values())):
        return RegionOptions(**given)
    try:
        return _remembered(**given)
    except TypeError:  # An unhashable value.
        return RegionOptions(**given)


def _holds_nothing(value: Any) -> bool:
    """Return whether remembering an option's value would keep no object alive."""
    if isinstance(value, Policy):
        return not any(issubclass(kind, Predicate) for kind in value.kinds)
    if isinstance(value, FunctionType):
        return not (value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return not callable(value)


# A call site passes the same options each time, and validating them takes 3 µs.
# `typed`, because 1 and True are equal keys.
_remembered = lru_cache(maxsize=256, typed=True)(RegionOptions)


def checked_options(options: Mapping[str, Any]) -> RegionOptions:
    """Create region options from a mapping; reject unknown option names."""
    unknown = options.keys() - OPTION_NAMES
    if unknown:
        raise OptionError(
            f"unknown option {', '.join(map(repr, sorted(unknown)))}; a region has "
            f"{', '.join(sorted(OPTION_NAMES))}"
        )
    return RegionOptions(**options)


class Statistics:
    """Counters over all calls to one region, reported by `status()`.

    Attributes:
        label: The region's name, also used in error messages.
        forwards: Number of calls that dropped saved tensors.
        skipped: Number of calls that saved no tensor, such as those without gradients.
        recomputes: Number of recomputes of the region.
        unrepeatable: Number of outputs that a replay region keeps because replaying
            them did not reproduce their bits.
        switched: Whether a rerun was inexact, so that the region is replayed since.
        has_replayed: Whether a call was recorded for a replay.
    """

    __slots__ = (
        *("forwards", "has_replayed", "label", "recomputes", "skipped", "switched"),
        "unrepeatable",
    )

    def __init__(self, label: str = ""):
        """Start all counters at zero."""
        self.label = label
        self.forwards = 0
        self.skipped = 0
        self.recomputes = 0
        self.unrepeatable = 0
        self.switched = False
        self.has_replayed = False

    def count_call(self, has_saved: bool) -> None:
        """Count a call under `forwards` if it saved tensors, else under `skipped`."""
        if has_saved:
            self.forwards += 1
        else:
            self.skipped += 1
