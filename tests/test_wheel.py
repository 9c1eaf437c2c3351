"""The wheel that users install: what is in it, and the types that they see."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/membudget"

USER = """\
import membudget as mb

def train(model: object, batch: object) -> None:
    fitted = mb.fit(model, batch, "8GiB")
    peak_bytes: int = mb.peak(lambda: None).peak_bytes
    wrong: str = fitted
    reveal_type(fitted.report())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run([*command, "-d", str(folder)], cwd=ROOT, check=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    kinds = {".py", ".h", ".cpp"}
    files = [p for p in PACKAGE.rglob("*") if p.suffix in kinds or p.name == "py.typed"]
    assert names == {f"membudget/{p.relative_to(PACKAGE).as_posix()}" for p in files}


def test_a_user_of_the_wheel_sees_its_types(wheel: Path, tmp_path: Path):
    # Without torch, which takes mypy a minute: what torch defines is `Any` then.
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "user.py").write_text(USER)
    python = tmp_path / "venv/bin/python"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    where = [f"--python-executable={python}", "--cache-dir=cache", "user.py"]
    options = ["--ignore-missing-imports", "--config-file=", "--no-color-output"]
    done = subprocess.run(
        [*mypy, *options, *where],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    assert (
        'user.py:6: error: Incompatible types in assignment (expression has type "Fi'
        in lines[0]
    )
    assert lines[1].endswith('note: Revealed type is "str"')
