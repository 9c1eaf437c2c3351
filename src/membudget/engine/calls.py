"""Record the calls to each function, so that most calls need no verification.

A rerun is exact if the function is deterministic and all its writes bump version
counters. Neither determinism nor version bumps are assumed: the 1st, 2nd, 4th, 8th, ...
call with a given *signature* is verified.

A signature (see `callees`) classifies a call before it runs; a *path*, the dtypes and
ranks of its saved tensors in order, classifies a call after it has run. After an
unverified call whose saved tensors have new dtypes or ranks, calls are verified until
one has the same path, or for at most `_PATIENCE` calls. The first call with a new path
may itself run unverified; its recompute is therefore checked for writes that bypass
version counters.

Verification completes in the backward pass, so all calls before the first backward pass
are verified. One case goes undetected: a rerun that becomes inexact between two
verified calls, while the saved tensors keep their dtypes and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

from torch import Size

from membudget.engine.callees import Signature, signature_of
from membudget.engine.comparison import Metadata
from membudget.engine.controls import SWITCHES
from membudget.engine.native import RERUN
from membudget.engine.sampling import Sampling, is_due_as

SavedPath = list[Metadata]

_MOST_KEYS = 4096
_MOST_PATHS = 1024
_PATIENCE = 256  # How many calls to verify while a new path is unconfirmed.


def counted(calls: int) -> tuple[int, bool]:
    """Count a call after so many; return their number, and whether this one is due.

    The 1st, 2nd, 4th, 8th, ... call is; while verification is postponed, the next of
    these does not come.
    """
    is_due = is_due_as(calls + 1)
    if is_due and SWITCHES.postponed:
        return calls, False
    return calls + 1, is_due


class Owner:
    """A function and the modules it references, regardless of its arguments.

    Attributes:
        differentiates: Whether the function itself runs a backward pass.
        adds_gradients: Whether a backward pass inside the function adds to the `.grad`
            of reachable tensors. All calls to a function that adds to `.grad` are
            verified, because a recompute hides `.grad` from it.
        binds: Whether a forward made further tensors reachable, such as a cache.
        replays: Whether a rerun of the function was found inexact, so that regions with
            engine `"auto"` replay the function from then on.
    """

    __slots__ = ("_refs", "adds_gradients", "binds", "differentiates", "replays")

    def __init__(self, key: Signature, parts: list[Any]):
        """Create a record with no flags set, dropped when an object in `parts` dies."""
        self.differentiates = self.adds_gradients = False
        self.binds = self.replays = False
        self._refs = held_weakly(parts, _OWNERS, key)


class Calls:
    """The call history of one signature.

    Attributes:
        owner: Data about the function, shared by all of its signatures.
        fills_late: Whether an operator fills a tensor only after saving it (as RReLU
            does with its noise), so that a recompute must not stop at the save.
        paths: The latest saved-tensor metadata for each number of saved tensors; most
            calls match one of these, and comparing is cheaper than hashing.
        sampling: Which calls are verified of those that differ in sizes alone; `None`
            if these have signatures of their own.
        writes_silently: Whether a call wrote to a large buffer, other than running
            statistics, without bumping its version counter.
    """

    __slots__ = (
        *("_awaited", "_count", "_given_up", "_is_settled", "_patience", "_refs"),
        *("_verified", "fills_late", "owner", "paths", "sampling"),
        "writes_silently",
    )

    def __init__(self, owner: Owner, key: Signature, parts: list[Any]):
        """Create an empty call history, dropped when an object in `parts` dies."""
        self.owner = owner
        self.paths: dict[int, SavedPath] = {}
        self.writes_silently = self.fills_late = False
        self.sampling: Sampling | None = None
        self._refs = held_weakly(parts, _KNOWN, key)
        self._count = 0
        self._is_settled = False
        self._patience = _PATIENCE
        self._verified: set[int] = set()
        self._awaited: set[int] = set()
        self._given_up: set[int] = set()  # No backward pass confirmed these.

    def begin(self, again: bool = True) -> bool:
        """Count a call, and return whether to verify it.

        Without `again`, no call is verified once a backward pass has confirmed one,
        but those that are sampled.
        """
        if self._is_settled:
            if self.sampling is not None:
                return self.sampling.is_due or self.owner.adds_gradients
            self._count, is_due = counted(self._count)
            return (again and is_due) or self.owner.adds_gradients
        self._count += 1
        self._patience -= 1
        if self._patience < 0:
            self._given_up |= self._awaited
            self._awaited.clear()
            self._is_settled = True
        return True

    def end(self, path: SavedPath) -> bool:
        """Record saved-tensor metadata; return whether no verified call matches it."""
        key = _hash_of(path)
        if key in self._verified or key in self._given_up:
            self._remember(path)
            return False
        known = len(self._verified) + len(self._given_up)
        if self.sampling is not None and not is_due_as(known + 1):
            self._given_up.add(key)
        elif key not in self._awaited and len(self._awaited) < _MOST_PATHS:
            self._awaited.add(key)
            self._is_settled = False
            self._patience = _PATIENCE
        return True

    def verified(self, path: SavedPath) -> None:
        """Record that saved tensors with this metadata were recomputed bit for bit."""
        if len(self._verified) >= _MOST_PATHS:
            self._verified.clear()
        key = _hash_of(path)
        self._verified.add(key)
        self._awaited.discard(key)
        self._is_settled = not self._awaited
        self._remember(path)

    def _remember(self, path: SavedPath) -> None:
        if len(self.paths) >= _MOST_PATHS:
            self.paths.clear()
        self.paths[len(path)] = path


def _hash_of(path: SavedPath) -> int:
    """Return a hash of the dtypes and ranks of a call's saved tensors.

    Sizes are ignored, because an MoE router saves tensors of new sizes in each call.
    """
    return hash(tuple([(dtype, len(shape)) for shape, dtype, _, _ in path]))


_KNOWN: dict[Signature, Calls] = {}
_OWNERS: dict[Signature, Owner] = {}


def calls_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    share: float | None = None,
) -> Calls:
    """Return the history of calls with the same signature as this call.

    With a share of calls that are sampled, signatures that differ in the sizes of
    tensors alone are the same; the call is counted among those that have it.
    """
    if RERUN and share is None:
        known = _KNOWN.get(RERUN[0].signature(function, args, kwargs))
        if known is not None:
            return known
    key, parts, held = signature_of(function, args, kwargs)
    if share is None:
        return _KNOWN.get(key) or _first_calls(key, parts, held)
    sizes = key
    ranks = [len(item) if type(item) is Size else item for item in sizes]
    key = share, *ranks
    calls = _KNOWN.get(key) or _first_calls(key, parts, held)
    if calls.sampling is None:
        calls.sampling = Sampling(share)
    calls.sampling.count(sizes)
    return calls


def forget_calls() -> None:
    """Clear all call histories, so that each function's next call is verified."""
    _KNOWN.clear()
    _OWNERS.clear()


def _first_calls(key: Signature, parts: list[Any], held: int) -> Calls:
    # A function without parts is implemented in C++; the key has its type and name.
    owner_key = tuple(map(id, parts[:held])) or key[:3]
    owner = _OWNERS.get(owner_key)
    if owner is None:
        owner = _OWNERS[owner_key] = Owner(owner_key, parts[:held])
    calls = _KNOWN[key] = Calls(owner, key, parts)
    for known in (_KNOWN, _OWNERS):
        if len(known) > _MOST_KEYS:
            known.pop(next(iter(known)), None)  # The oldest entry.
    return calls


def held_weakly(
    parts: list[Any], known: dict[Signature, Any], key: Signature
) -> list[Any]:
    """Return weak references to `parts`; delete `known[key]` when any part dies."""
    pop = known.pop  # At interpreter exit the global name may be gone.

    def forget(_: ReferenceType[Any]) -> None:
        pop(key, None)

    return [ref(part, forget) for part in parts]
