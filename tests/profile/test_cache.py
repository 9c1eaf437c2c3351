"""A profile that is read from a cache is the one that was made, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.errors import OptionError
from membudget.profile import cache as caching
from membudget.profile import profiling
from membudget.profile.cache import FROM_CACHE, NOT_CACHED, Cache
from membudget.state import description
from membudget.step import Step

SECONDS = 60.0


def made() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)), torch.ones(2, 4)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Note each step that is recorded."""
    steps: list[Step] = []
    record = profiling._new_profile

    def noting(step: Step, *options: Any) -> mb.Profile:
        steps.append(step)
        return record(step, *options)

    monkeypatch.setattr(profiling, "_new_profile", noting)
    return steps


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam])
def test_a_step_with_the_same_key_does_not_run(
    tmp_path, recorded, monkeypatch, fake, optimizer
):
    options: dict[str, Any] = {"fake": fake, "optimizer": optimizer, "cache": tmp_path}
    first = mb.profile(*made(), **options)
    assert len(recorded) == 1
    monkeypatch.setattr(Step, "run", None)
    second = mb.profile(*made(), **options)
    assert len(recorded) == 1
    assert second.notes == (*first.notes, FROM_CACHE)
    assert second.graph == first.graph
    assert second.to_dict() | {"notes": list(first.notes)} == {
        **first.to_dict(),
        "notes": list(first.notes),
    }
    assert FROM_CACHE not in first.report()
    assert "read from the cache" in " ".join(second.report().split())


def test_a_step_with_another_key_runs(tmp_path, recorded):
    mb.profile(*made(), cache=tmp_path)
    model, batch = made()
    mb.profile(model, batch[:1], cache=tmp_path)
    mb.profile(model.eval(), batch, cache=tmp_path)
    assert len(recorded) == len([*tmp_path.iterdir()]) == 3


def test_without_a_cache_nothing_is_kept(tmp_path, recorded, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert FROM_CACHE not in mb.profile(*made()).notes
    assert len(recorded) == 2
    assert [*tmp_path.iterdir()] == []


def damaged(text: str) -> dict[str, bytes]:
    data = text.encode()
    middle = len(data) // 2
    flipped = bytes([data[middle] ^ 1])
    no_profile = '{"no": "profile"}'
    digest = sha256(no_profile.encode()).hexdigest()
    return {
        "empty": b"",
        "truncated": data[:middle],
        "a bit is another one": data[:middle] + flipped + data[middle + 1 :],
        "a number is another one": data.replace(b'_start": ', b'_start": 1'),
        "not text": b"\xff\xfe" + data,
        "longer": data + b"more\n",
        "no profile": f"{digest}\n{no_profile}\n".encode(),
    }


@pytest.mark.parametrize("how", damaged("{}"))
def test_a_damaged_file_is_written_anew(tmp_path, recorded, how):
    whole = mb.profile(*made(), cache=tmp_path, fake=True)
    path = only_file(tmp_path)
    before = path.read_text()
    path.write_bytes(damaged(before)[how])
    again = mb.profile(*made(), cache=tmp_path, fake=True)
    assert again == whole
    assert only_file(tmp_path).read_text() == before
    assert len(recorded) == 2
    assert FROM_CACHE in mb.profile(*made(), cache=tmp_path, fake=True).notes


def test_a_file_that_cannot_be_written_costs_nothing_but_a_note(tmp_path):
    mb.profile(*made(), cache=tmp_path)
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    found = mb.profile(*made(), cache=tmp_path)
    assert found.graph.operators
    assert found.notes[-1].startswith(f"{NOT_CACHED}it cannot be written: ")
    assert [*tmp_path.iterdir()] == [path]


def test_a_step_without_a_key_is_profiled_and_says_why(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(description, "MOST_OBJECTS", 10)
    found = mb.profile(*made(), cache=tmp_path)
    assert found.notes[-1] == f"{NOT_CACHED}it leads to more than 10 objects"
    assert [*tmp_path.iterdir()] == []
    assert recorded


def test_a_step_that_fails_leaves_nothing_in_the_cache(tmp_path):
    def fail(output: Any, batch: Any) -> Any:
        raise ArithmeticError("no loss")

    with pytest.raises(ArithmeticError, match="no loss"):
        mb.profile(*made(), fail, cache=tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_the_folder_is_made(tmp_path):
    folder = tmp_path / "a" / "b"
    mb.profile(*made(), cache=str(folder))
    assert only_file(folder).suffix == ".profile"
    assert Cache.at(folder) == Cache(folder, reads=True)


@pytest.mark.parametrize("what", ["a file", "below a file", "a number"])
def test_what_is_no_folder_is_refused_before_the_step_runs(tmp_path, recorded, what):
    file = tmp_path / "file"
    file.touch()
    cache: Any = {"a file": file, "below a file": file / "a", "a number": 5}[what]
    with pytest.raises(OptionError, match="cache must be the path of a folder"):
        mb.profile(*made(), cache=cache)
    with pytest.raises(OptionError, match="cache must be the path of a folder"):
        mb.fit(*made(), "60%", cache=cache)
    assert recorded == []


def test_a_cache_that_does_not_read_is_written(tmp_path):
    first, second = (mb.profile(*made(), fake=True, device=d) for d in ("h100", "l4"))
    assert first != second
    key: Callable[[], str] = lambda: "key"  # noqa: E731
    cache = Cache(tmp_path)
    assert cache.profile(key, lambda: first) is first
    assert cache.profile(key, lambda: second).graph == first.graph
    assert Cache(tmp_path, reads=False).profile(key, lambda: second) is second
    assert cache.profile(key, lambda: first).graph == second.graph


def test_threads_that_make_the_same_profile_keep_one(tmp_path):
    profile = mb.profile(*made(), fake=True)
    barrier = Barrier(2)

    def make() -> mb.Profile:
        barrier.wait(SECONDS)  # Both found nothing, and both write.
        return profile

    cache = Cache(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(cache.profile, lambda: "key", make) for _ in range(2)]
        assert [f.result(SECONDS) for f in found] == [profile, profile]
    assert only_file(tmp_path).name == "key.profile"
    kept = caching._read(tmp_path / "key.profile")
    assert kept == profile


def test_a_sweep_reads_its_profiles_from_the_cache(tmp_path, recorded):
    def make(batch: int) -> tuple[nn.Module, torch.Tensor]:
        return nn.Linear(8, 4), torch.zeros(batch, 8)

    first = mb.sweep(make, batch=[1, 2], cache=tmp_path)
    assert mb.sweep(make, batch=[1, 2], cache=tmp_path) == first
    assert len(recorded) == len([*tmp_path.iterdir()]) == 2
