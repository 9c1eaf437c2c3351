"""Which tests run which lines, and the order in which they are tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("libcst")
pytest.importorskip("mutmut")
pytest.importorskip("coverage")

from coverage import CoverageData

from tools.mutants.covering import Measured, batches, files_of_tests, places
from tools.mutants.find import Mutant

HERE = "src/a.py"


def measured(folder: Path, name: str, lines: dict[str, list[int]], **seconds: float):
    """Measure a file of tests: the lines that each test runs, and its time."""
    path = folder / f"{name}.coverage"
    data = CoverageData(basename=str(path))
    for test, run in lines.items():
        data.set_context(test)
        data.add_lines({HERE: run})
    data.write()
    noted = {"collect_s": 1.0, "seconds": seconds, "others": []}
    path.with_suffix(".json").write_text(json.dumps(noted))
    return Measured(f"tests/{name}.py", path)


def mutant(*lines: int) -> Mutant:
    return Mutant(HERE, lines[0], "number", range(lines[0], lines[-1] + 1), "1", "2")


def test_only_tests_that_run_a_line_of_the_mutant_are_tried(tmp_path):
    file = measured(tmp_path, "one", {"t": [1, 2], "u": [3]}, t=1.0, u=1.0)
    (found,) = batches(mutant(3), [file])
    assert found.tests == ("u",)
    assert batches(mutant(4), [file]) == []


def test_a_test_that_did_not_pass_is_no_witness(tmp_path):
    file = measured(tmp_path, "one", {"t": [1], "u": [1]}, t=1.0)
    (found,) = batches(mutant(1), [file])
    assert found.tests == ("t",)


def test_the_fastest_file_comes_first_and_in_it_the_fastest_test(tmp_path):
    slow = measured(tmp_path, "slow", {"t": [1], "u": [1]}, t=5.0, u=2.0)
    fast = measured(tmp_path, "fast", {"v": [1]}, v=3.0)
    found = batches(mutant(1), [slow, fast])
    assert [batch.tests for batch in found] == [("v",), ("u", "t")]
    assert [batch.seconds for batch in found] == [4.0, 8.0]


def test_a_limit_leaves_out_the_slowest_tests(tmp_path):
    slow = measured(tmp_path, "slow", {"t": [1], "u": [1]}, t=5.0, u=2.0)
    fast = measured(tmp_path, "fast", {"v": [1]}, v=3.0)
    found = batches(mutant(1), [slow, fast], most_s=6.0)
    assert {test for batch in found for test in batch.tests} == {"u", "v"}


def test_a_measurement_is_kept_until_what_it_depends_on_changes(tmp_path):
    files = {
        "src/a.py": "x = 1\n",
        "tests/helper.py": "",
        "tests/test_a.py": "",
        "tests/test_b.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def found() -> dict[str, Path]:
        tests = [tmp_path / name for name in files if "test_" in name]
        return places(tmp_path, tmp_path, tests)

    before = found()
    (tmp_path / "tests/test_a.py").write_text("# changed\n")
    now = found()
    assert now["tests/test_a.py"] != before["tests/test_a.py"]
    assert now["tests/test_b.py"] == before["tests/test_b.py"]
    (tmp_path / "src/a.py").write_text("x = 2\n")
    assert found()["tests/test_b.py"] != before["tests/test_b.py"]
    (tmp_path / "src/a.py").write_text("x = 1\n")
    (tmp_path / "tests/helper.py").write_text("# changed\n")
    assert found()["tests/test_b.py"] != before["tests/test_b.py"]


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("engine/bits.py", ["behaviours/test_x.py", "engine/test_bits.py"]),
        ("cli.py", ["behaviours/test_x.py", "test_cli.py"]),
        ("cli_plan.py", ["behaviours/test_x.py", "test_cli_plan.py"]),
        ("fit.py", ["behaviours/test_x.py", "test_fit_limited.py"]),
    ],
)
def test_tests_of_other_parts_of_the_package_are_left_out(tmp_path, source, tests):
    for name in ("engine/bits.py", "cli.py", "cli_plan.py", "fit.py", "__init__.py"):
        path = tmp_path / "src/membudget" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    names = ("behaviours/test_x.py", "engine/test_bits.py", "engine/helper.py")
    for name in (*names, "test_cli.py", "test_cli_plan.py", "test_fit_limited.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = files_of_tests(tmp_path, [tmp_path / "src/membudget" / source])
    assert [p.relative_to(tmp_path / "tests").as_posix() for p in found] == tests


def test_doctests_are_tests_of_their_file(tmp_path):
    source = tmp_path / "src/membudget/sizes.py"
    source.parent.mkdir(parents=True)
    source.write_text("# >>> 1 + 1\n")
    (tmp_path / "tests").mkdir()
    assert files_of_tests(tmp_path, [source]) == [source]
    source.write_text("")
    assert files_of_tests(tmp_path, [source]) == []
