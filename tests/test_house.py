"""One name for one idea: what a reader of `src` may count on.

What is called only by tests is dead, and a name that two files define has to be asked
about each time that it is read.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import membudget
from membudget import pipeline

SOURCE = Path(__file__).parents[1] / "src" / "membudget"
TREES = {
    path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
}

# Called from outside of the package, by what each is for.
CALLED_BY = {
    "_should_skip_dynamo": "torch's mode stack",
    "forget_calls": "tests, each of which begins as a new process does",
    "ignore_compile_internals": "torch's mode stack",
    "on_exception": "Lightning's Trainer",
    "on_train_batch_end": "Lightning's Trainer",
    "on_train_begin": "transformers' Trainer",
    "on_train_end": "transformers' Trainer and Lightning's",
    "on_train_start": "Lightning's Trainer",
}


def class_names(tree: ast.Module) -> set[str]:
    """Return the classes and aliases that a file defines, without underscores."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and (node in tree.body):
            for name in _targets(node):
                # `Kind = Literal[...]`, and no constant such as `KINDS`.
                if re.match(r"_?[A-Z][a-z]", name):
                    names.add(name)
    return {name.lstrip("_") for name in names}


def _targets(node: ast.stmt) -> list[str]:
    targets = getattr(node, "targets", None) or [
        getattr(node, "target", None) or getattr(node, "name", None)
    ]
    return [t.id for t in targets if isinstance(t, ast.Name)]


def test_no_class_name_is_defined_in_two_files():
    files = defaultdict(list)
    for path, tree in TREES.items():
        for name in class_names(tree):
            # A user has one of the frameworks, in each of which it is the same thing.
            if (name, path.split("/")[0]) != ("BudgetCallback", "integrations"):
                files[name].append(path)
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_no_file_name_is_used_twice():
    names = Counter(Path(path).name for path in TREES)
    del names["__init__.py"]
    assert [name for name, count in names.items() if count > 1] == []


def uses(tree: ast.Module) -> Counter[str]:
    """Count the names that a file reads: bare, after a dot, and in strings of names."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
        elif isinstance(node, ast.alias):
            found[node.name] += 0  # An import alone is no use.
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"^\w+$", node.value))
    return found


def functions(tree: ast.Module) -> set[str]:
    """Return the functions and methods that a file defines, but for special methods."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("__")
    }


def public_names() -> set[str]:
    """Return what users call: public names, and the methods of public classes."""
    names: set[str] = set()
    for package in (membudget, pipeline):
        names |= set(package.__all__)
        for name in package.__all__:
            names |= set(dir(getattr(package, name)))
    return names


def test_every_function_is_called_in_the_package_or_by_its_users():
    used = sum((uses(tree) for tree in TREES.values()), Counter[str]())
    defined = {name for tree in TREES.values() for name in functions(tree)}
    unused = {name for name in defined if not used[name]} - public_names()
    assert unused - CALLED_BY.keys() == set()
