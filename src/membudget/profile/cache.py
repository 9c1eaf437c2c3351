"""Profiles of earlier runs, kept in a folder that several processes may share.

A file holds a digest and, below it, one profile as JSON. A file that was damaged is
written anew, and so is one whose digest is right but whose JSON is no valid profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from membudget.errors import OptionError
from membudget.profile.result import Profile
from membudget.state.code import IndescribableError
from membudget.text import write_whole

FROM_CACHE = (
    "it was read from the cache: the step was recorded, and its seconds were measured, "
    "in an earlier run"
)

NOT_CACHED = "it was not cached, because "


@dataclass(frozen=True)
class Cache:
    """A folder of profiles.

    Attributes:
        folder: The folder.
        reads: Whether profiles are read; if not, they are only written.
    """

    folder: Path
    reads: bool = True

    @classmethod
    def at(cls, folder: str | Path) -> Cache:
        """Make the folder if there is none.

        Raises:
            OptionError: If it cannot be made, because the path is that of a file.
        """
        try:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise OptionError(f"cache must be the path of a folder: {error}") from error
        return cls(path)

    def profile(self, key: Callable[[], str], make: Callable[[], Profile]) -> Profile:
        """Return the profile with a key, or make it and keep it.

        A note of the profile says where it comes from, or why it was not kept.
        """
        try:
            path = self.folder / f"{key()}.profile"
        except IndescribableError as error:
            return _noted(make(), f"{NOT_CACHED}{error}")
        found = _read(path) if self.reads else None
        if found is not None:
            return _noted(found, FROM_CACHE)
        found = make()
        text = found.to_json()
        try:
            write_whole(path, f"{_digest(text)}\n{text}\n", "it")
        except OptionError as error:
            return _noted(found, f"{NOT_CACHED}{error}")
        return found


def _read(path: Path) -> Profile | None:
    """Return the profile in a file; `None` if there is none, or it is damaged."""
    try:
        digest, text = path.read_text(encoding="utf-8").splitlines()
        return Profile.from_json(text) if digest == _digest(text) else None
    except (OSError, ValueError):  # Also text that is not UTF-8, or no profile.
        return None


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _noted(found: Profile, note: str) -> Profile:
    return replace(found, notes=(*found.notes, note))
