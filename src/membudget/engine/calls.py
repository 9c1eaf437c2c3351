"""The history of a function's calls, which makes verifying most calls unnecessary.

A rerun is exact if the function is deterministic and writes no memory behind the
version counters. Neither is assumed: the first call of each *signature* is verified,
and calls number 2, 4, 8, 16, ... after it.

A signature (see `callees`) is what is known before a call. A *path* is what is known
after it: dtypes and ranks of the saved tensors, in order. When a call takes a path that
no verified call has taken, the next calls are verified until one takes it, or until
`_PATIENCE` calls have not. The call that discovered the path was not verified, so its
recompute is checked for writes behind the version counters.

All calls before the first backward count as first calls. One case goes unnoticed: a
function that becomes inexact, on a known path, between two verified calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

from membudget.engine.callees import Signature, signature_of
from membudget.engine.comparison import Metadata

SavedPath = list[Metadata]

_MOST_KEYS = 4096
_MOST_PATHS = 1024
_PATIENCE = 256


class Owner:
    """A function and the modules it holds, whatever its arguments.

    Attributes:
        differentiates: Whether it runs a backward of its own.
        adds_gradients: Whether that backward accumulates into `.grad` of tensors that
            the function reaches. A recompute sees `.grad` unset, which matters if the
            function reads it, so all calls are verified.
        replays: Whether a rerun was found inexact. From then on, regions with engine
            `"auto"` replay the function.
    """

    __slots__ = ("_refs", "adds_gradients", "differentiates", "replays")

    def __init__(self, key: Signature, parts: list[Any]):
        """Start with nothing known; forget the function when one of `parts` dies."""
        self.differentiates = self.adds_gradients = self.replays = False
        self._refs = _held_weakly(parts, _OWNERS, key)


class Calls:
    """The calls of one signature.

    Attributes:
        owner: The function.
        fills_late: Whether an operator fills a tensor after saving it (RReLU its
            noise), so that a recompute must not stop there.
        paths: What calls on verified paths saved: the latest of each length, because
            most calls equal it, and comparing is cheaper than hashing.
        writes_silently: Whether a call wrote a large buffer without bumping its
            version.
    """

    __slots__ = (
        *("_awaited", "_count", "_given_up", "_is_settled", "_patience", "_refs"),
        *("_verified", "fills_late", "owner", "paths", "writes_silently"),
    )

    def __init__(self, owner: Owner, key: Signature, parts: list[Any]):
        """Start before the first call."""
        self.owner = owner
        self.paths: dict[int, SavedPath] = {}
        self.writes_silently = self.fills_late = False
        self._refs = _held_weakly(parts, _KNOWN, key)
        self._count = 0
        self._is_settled = False
        self._patience = _PATIENCE
        self._verified: set[int] = set()
        self._awaited: set[int] = set()
        self._given_up: set[int] = set()  # No backward pass came along these.

    def begin(self) -> bool:
        """Count a call; return whether to verify it."""
        self._count = count = self._count + 1
        if self._is_settled:
            return not count & (count - 1) or self.owner.adds_gradients
        self._patience -= 1
        if self._patience < 0:
            self._given_up |= self._awaited
            self._awaited.clear()
            self._is_settled = True
        return True

    def end(self, path: SavedPath) -> bool:
        """Record what a call saved, if that is none of `paths`.

        Returns:
            Whether it took a path that is still to be verified.
        """
        key = _hash_of(path)
        if key in self._verified or key in self._given_up:
            self._remember(path)
            return False
        if key not in self._awaited and len(self._awaited) < _MOST_PATHS:
            self._awaited.add(key)
            self._is_settled = False
            self._patience = _PATIENCE
        return True

    def verified(self, path: SavedPath) -> None:
        """Record that a call on this path was recomputed bit for bit."""
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
    """Return a hash that ignores the lengths of dimensions.

    A router saves tensors of other lengths in each call, on the same path.
    """
    return hash(tuple([(dtype, len(shape)) for shape, dtype, _, _ in path]))


_KNOWN: dict[Signature, Calls] = {}
_OWNERS: dict[Signature, Owner] = {}


def calls_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Calls:
    """Return the history of calls like this one."""
    key, parts, held = signature_of(function, args, kwargs)
    return _KNOWN.get(key) or _first_calls(key, parts, held)


def forget_calls() -> None:
    """Treat the next call of each function as its first."""
    _KNOWN.clear()
    _OWNERS.clear()


def _first_calls(key: Signature, parts: list[Any], held: int) -> Calls:
    # A function without parts is implemented in C++; the key names it.
    owner_key = tuple(map(id, parts[:held])) or key[:3]
    owner = _OWNERS.get(owner_key)
    if owner is None:
        owner = _OWNERS[owner_key] = Owner(owner_key, parts[:held])
    calls = _KNOWN[key] = Calls(owner, key, parts)
    for known in (_KNOWN, _OWNERS):
        if len(known) > _MOST_KEYS:
            known.pop(next(iter(known)), None)
    return calls


def _held_weakly(
    parts: list[Any], known: dict[Signature, Any], key: Signature
) -> list[Any]:
    """Return weak references to `parts`; the first to die removes the entry `key`."""
    pop = known.pop  # At interpreter exit the global name may be gone.

    def forget(_: ReferenceType[Any]) -> None:
        pop(key, None)

    return [ref(part, forget) for part in parts]
