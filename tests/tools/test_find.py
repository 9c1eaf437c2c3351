"""Where faults are planted, where none are, and which are drawn."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("libcst")
pytest.importorskip("mutmut")

from tools.mutants.find import Mutant, Site, draw, sites

LOOP = '''\
"""A module."""

LIMIT = 3


def total(values, start=0):
    """Add up values."""
    if start > LIMIT:
        values.clear()
    for value in values:
        start += value
    return start
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loop.py").write_text(LOOP)
    return tmp_path


def places(folder: Path, source: str) -> list[Site]:
    (folder / "source.py").write_text(source)
    return sites(folder, folder / "source.py")


def mutants(folder: Path, source: str) -> list[Mutant]:
    return [mutant for site in places(folder, source) for mutant in site.mutants()]


def changed(found: list[Mutant]) -> set[str]:
    return {line[1:].strip() for m in found for line in m.diff() if line[0] == "+"}


def test_every_mutant_is_python_and_differs(folder):
    found = mutants(folder, LOOP)
    assert len(found) > 5
    for mutant in found:
        ast.parse(mutant.after)
        assert mutant.after != mutant.before == LOOP


def test_a_call_is_left_out_and_a_condition_turned_around(folder):
    lines = changed(mutants(folder, LOOP))
    assert "pass" in lines
    assert "if (not (start > LIMIT)):" in lines
    assert "if start >= LIMIT:" in lines


@pytest.mark.parametrize(
    "source",
    [
        '"""Text of the module."""',
        "def f():\n    '''Text of the function.'''",
        "def f(x: Literal[3] = None) -> Literal[4]: ...",
        "count: Literal[3]",
        "from a import True_ as b",
        "class A:\n    __slots__ = ('a', 'b')",
        "__all__ = ['a']",
        "if TYPE_CHECKING:\n    x = 3",
        "raise ValueError(f'{x} is no size', 3)",
        "@dataclass(frozen=True)\nclass A: ...",
        "T = TypeVar('T')",
        "Mode = Literal['a', 'b']",
        "cast('Tensor', x)[y]",
        "f'{a + 3}'[b]",
    ],
)
def test_nothing_that_only_readers_and_type_checkers_see_is_changed(folder, source):
    assert places(folder, source) == []


def test_a_warning_can_be_left_out_but_its_text_stays(folder):
    found = mutants(folder, "warnings.warn('a b', stacklevel=2)")
    assert changed(found) == {"pass"}


def test_what_a_call_says_to_a_person_stays(folder):
    found = mutants(folder, "x = refuse(name, 'has no gradient')")
    kept = [mutant for mutant in found if mutant.operator == "arg_removal"]
    assert changed(kept) == {
        "x = refuse(None, 'has no gradient')",
        "x = refuse('has no gradient')",
    }


def test_a_fault_in_a_function_concerns_the_tests_that_run_its_statement(folder):
    by_line = {site.line: site.lines for site in places(folder, LOOP)}
    assert by_line[9] == range(9, 10)
    assert by_line[11] == range(11, 12)


def test_a_fault_in_a_default_concerns_the_tests_that_run_the_function(folder):
    by_line = {site.line: site.lines for site in places(folder, LOOP)}
    assert by_line[6] == range(6, 13)


def test_a_fault_at_the_import_concerns_the_tests_that_run_the_file(folder):
    by_line = {site.line: site.lines for site in places(folder, LOOP)}
    assert set(range(3, 13)) <= set(by_line[3])


def test_a_seed_draws_the_same_mutants_again_and_another_seed_others(folder):
    paths = [folder / "loop.py"]
    first = draw(folder, paths, seed=3, count=5)
    assert draw(folder, paths, seed=3, count=5) == first
    assert draw(folder, paths, seed=4, count=5) != first


def test_no_place_is_drawn_twice(folder):
    found = draw(folder, [folder / "loop.py"], seed=0, count=1000)
    assert len(found) == len(places(folder, LOOP))


def test_a_mutant_is_named_by_its_file_and_the_line_that_differs(folder):
    for mutant in mutants(folder, LOOP):
        assert mutant.path == "source.py"
        assert mutant.diff()[0] == "-" + LOOP.splitlines()[mutant.line - 1]
