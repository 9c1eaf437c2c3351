"""The floors of the house, and the map of them that CONTRIBUTING shows.

    .venv/bin/python -m tools.map           print the map
    .venv/bin/python -m tools.map --write   put it into CONTRIBUTING.md

Each line is a file or package with the first sentence of its docstring, so that the map
says what the files say.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/membudget"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- map -->\n", "<!-- end of the map -->"

# From the top. A module imports what is below it, or beside it on its own floor.
FLOORS = (
    ("the package", "__init__"),
    ("the command line", "__main__ cli cli_plan cli_options"),
    ("ways in beside fit", "compat integrations loop pipeline tradeoff"),
    (
        "fit",
        "trial fit one_plan recorded fastest fittable fitted terms race planning "
        "limited attempt outcome modes host refusal allowance deadline",
    ),
    ("text for people", "report"),
    ("proof", "audit"),
    (
        "regions on a model",
        "apply planned numbered spans offloaded_module attach policies",
    ),
    ("numbers: a step, a plan, bytes", "planner profile memory"),
    ("engines", "engine"),
    ("what is saved, elsewhere", "offload"),
    (
        "a step and its state",
        "step draws rehearsal batch selection ranks sharding state scope ops observer "
        "graph",
    ),
    ("records", "callsite columns operator_names text progress"),
    (
        "torch, errors",
        "_torch _torch_accelerator _torch_distributed _torch_drawing _torch_fsdp "
        "_torch_modules _torch_observing _torch_pipelining _torch_settings "
        "_torch_stage allocation errors",
    ),
)


def map_lines() -> Iterator[str]:
    """Yield the lines of the map: floors from the top, files with what they are."""
    for title, units in FLOORS:
        yield f"{title}"
        for unit in units.split():
            package = SOURCE / unit
            if package.is_dir():
                yield f"    {unit + '/':22}{first_sentence(package / '__init__.py')}"
                for path in files_of(package):
                    name = path.relative_to(package).as_posix()
                    yield f"        {name:24}{first_sentence(path)}"
            else:
                name = f"{unit}.py"
                yield f"    {name:22}{first_sentence(SOURCE / name)}"


def files_of(package: Path) -> list[Path]:
    """Return the modules of a package, those of packages inside of it last."""
    paths = [p for p in package.rglob("*.py") if p.name != "__init__.py"]
    return sorted(paths, key=lambda p: (len(p.parts), p))


def first_sentence(path: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0] if text else ""


def page_with_map(page: str) -> str:
    """Return a page with its map as the tree is now."""
    before, rest = page.split(BEGIN)
    drawn = "\n".join(line.rstrip() for line in map_lines())
    return f"{before}{BEGIN}```text\n{drawn}\n```\n{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str]) -> int:
    """Print the map, or write it."""
    if "--write" in arguments:
        PAGE.write_text(page_with_map(PAGE.read_text(encoding="utf-8")), "utf-8")
    else:
        print("\n".join(map_lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
