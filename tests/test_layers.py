"""The house: who may import whom, and where private names of torch may stand."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tools.map import FLOORS, PAGE, page_with_map

SOURCE = Path(__file__).parents[1] / "src" / "membudget"

FLOOR_OF = {unit: n for n, (_, units) in enumerate(FLOORS) for unit in units.split()}
# What a plan is made of is numbers, so that it can be made anywhere.
PLANNER_MAY = {"planner", "graph", "text", "errors"}

WITHOUT_TORCH = (
    *(
        "errors",
        "graph",
        "columns",
        "cli",
        "cli_options",
        "cli_plan",
        "text",
        "progress",
    ),
    *("tradeoff", "__init__", "profile/live_ranges", "profile/polynomial"),
    *(f"report/{path.stem}" for path in sorted((SOURCE / "report").glob("*.py"))),
    *(f"planner/{path.stem}" for path in sorted((SOURCE / "planner").glob("*.py"))),
)

FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a file's module below the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return each module that a file imports, and whether for type checking alone.

    A result may print itself: imports of `report` inside its `__str__` or `report` are
    left out, because they run when somebody prints it and load nothing before.
    """
    tree = tree_of(path)
    prints_itself = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("__str__", "report")
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom)
        and (inner.module or "").startswith("membudget.report")
    }
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in prints_itself:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            names = [n if is_module(n) else module for n in inner]
        found += [(name, id(node) in typing_only) for name in names]
    return found


def is_module(dotted: str) -> bool:
    """Return whether a dotted name is a module of ours."""
    if not dotted.startswith("membudget."):
        return False
    path = SOURCE.joinpath(*dotted.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def ours(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, by their dotted names."""
    return {
        name.removeprefix("membudget.")
        for name, _ in imports(path)
        if name.startswith("membudget.")
    }


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path: Path):
    floor = FLOOR_OF[unit_of(module_name(path))]
    assert not {name for name in ours(path) if FLOOR_OF[unit_of(name)] < floor}


def test_the_planner_imports_what_a_plan_is_made_of_and_nothing_else():
    paths = [path for path in FILES if unit_of(module_name(path)) == "planner"]
    assert {unit_of(name) for path in paths for name in ours(path)} <= PLANNER_MAY


def test_every_module_stands_on_a_floor():
    assert {unit_of(module_name(path)) for path in FILES} == FLOOR_OF.keys()


def test_the_map_in_contributing_is_that_of_the_tree():
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_map(page), "run: .venv/bin/python -m tools.map --write"


def test_the_engines_stand_side_by_side_on_what_they_share():
    on_top = {f"engine.{name}" for name in ("region", "sequential")}
    rerun = {f"engine.{name}" for name in ("rerun", "rerun_frame", "recording")}
    for path in FILES:
        name, used = module_name(path), ours(path)
        if name.startswith("engine.replay."):
            assert not used & (on_top | rerun | {"engine.reentrant"})
        elif name.startswith("engine.") and name not in on_top:
            assert not any(module.startswith("engine.replay") for module in used)


def unit_of(name: str) -> str:
    """Return the package or module on a floor that a dotted name is a part of."""
    return name.split(".")[0]


def test_modules_have_no_import_cycle():
    graph = {module_name(path): ours(path) for path in FILES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for below in graph.get(name, ()):
                visit(below, (*above, name))
            done.add(name)

    for name in graph:
        if name != "__init__":
            visit(name, ())


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_some_modules_do_not_import_torch(name: str):
    found = {module for module, typing in imports(SOURCE / f"{name}.py") if not typing}
    assert not {module for module in found if module.split(".")[0] == "torch"}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not path.name.startswith("_torch")],
    ids=module_name,
)
def test_private_names_of_torch_appear_only_in_torch_modules(path: Path):
    tree = tree_of(path)
    private = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node).startswith("torch.")
    ]
    private += [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for alias in node.names
        if any(p.startswith("_") for p in f"{node.module}.{alias.name}".split("."))
    ]
    private += [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("torch.") and "._" in alias.name
    ]
    assert not private


def test_rich_is_imported_in_one_module():
    # It draws from Python's `random` when it is imported.
    users = {
        module_name(path)
        for path in FILES
        for name, typing_only in imports(path)
        if name.split(".")[0] == "rich" and not typing_only
    }
    assert users == {"report"}


@pytest.mark.parametrize("package", ["profile", "memory", "state.snapshot", "step"])
def test_measuring_a_step_loads_nothing_that_applies_plans(package: str):
    code = f"import sys, membudget.{package}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    above = ("apply", "audit", "spans", "carrier", "report", "fit")
    loaded = found.stdout.split()
    assert f"membudget.{package}" in loaded
    assert not [
        name
        for name in loaded
        if name.startswith(tuple(f"membudget.{unit}" for unit in above))
    ]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_file_is_long(path: Path):
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_function_is_long(path: Path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            body = node.body
            if ast.get_docstring(node) is not None:
                body = body[1:]
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 40, f"{node.name} has {lines} lines"
