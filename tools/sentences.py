"""Print docstring sentences of the package, drawn at random, to be read aloud.

    python3 run.py sentences [--seed N] [--count 130] [--places]

A sentence is good if an engineer of the field who has never seen the code knows what
it says. The seed is by default the first six hexadecimal digits of the last commit, so
that nobody chooses what is read; `--places` adds where each sentence stands.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/membudget"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_HEADING = re.compile(r"^(Args|Returns|Yields|Raises|Warns|Attributes|Example)s?:$")
_ENTRY = re.compile(r"^\*{0,2}\w+(, \w+)*: ")
_ITEM = re.compile(r"^([-*•] |\d+\. |Rule \d+\. )")
_COLUMNS = re.compile(r"\S {2,}\S")
# A full stop, then a capital, a digit or a quote; not after "e.g." or a lone initial.
_END = re.compile(
    r"(?<![A-Z])(?<!Rule \d)(?<!Rule \d\d)(?<!e\.g)(?<!i\.e)([.?!][\"'`)]*)"
    r"\s+(?=[A-Z0-9\"'`(])"
)


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="run.py sentences", description=__doc__)
    parser.add_argument("--seed", type=lambda text: int(text, 16), help="hexadecimal")
    parser.add_argument("--count", type=int, default=130)
    parser.add_argument("--places", action="store_true")
    options = parser.parse_args(arguments)
    seed = last_commit() if options.seed is None else options.seed
    found = list(sentences(SOURCE))
    drawn = random.Random(seed).sample(found, min(options.count, len(found)))
    print(f"{len(drawn)} of {len(found)} sentences, seed {seed:06x}\n")
    for number, (place, sentence) in enumerate(drawn, start=1):
        where = f"  [{place}]" if options.places else ""
        text = f"{number:3d}. {sentence}{where}"
        print(textwrap.fill(text, 88, subsequent_indent="     "))
    return 0


def last_commit() -> int:
    """Return the first six hexadecimal digits of the last commit, as a number."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout[:6], 16)


def sentences(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each docstring sentence below `folder`, with the place of its docstring."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                name = getattr(node, "name", "")
                place = f"{path.relative_to(folder).as_posix()} {name}".rstrip()
                for sentence in sentences_of(text):
                    yield place, sentence


def sentences_of(docstring: str) -> Iterator[str]:
    r"""Yield the sentences of one docstring; headings, examples and drawings are none.

    Example:
        >>> list(sentences_of("Do this. Then that.\n\nArgs:\n    x: A number."))
        ['Do this.', 'Then that.', 'x: A number.']
    """
    for paragraph in paragraphs_of(docstring):
        parts = _END.split(paragraph)
        for text, end in zip(parts[::2], [*parts[1::2], ""], strict=True):
            if (whole := text + end) and " " in whole:
                yield whole


def paragraphs_of(docstring: str) -> Iterator[str]:
    """Yield each paragraph, and each entry of a section, as one line.

    Lines in columns are a drawing. Indented ones are a drawing or code, unless a
    heading or an entry is above them.
    """
    lines: list[str] = []
    in_section = in_example = False
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        text = line.strip()
        patterns = (_HEADING, _ITEM, *([_ENTRY] if in_section else []))
        begins = not text or any(pattern.match(text) for pattern in patterns)
        if begins and lines:
            yield " ".join(lines)
            lines = []
        if not line.startswith(" ") and text:
            in_section = in_example = False
        if _HEADING.match(text):
            in_section, in_example = True, text.startswith("Example")
        elif in_example or not text or _COLUMNS.search(text):
            continue
        elif in_section or lines or line == text:
            lines.append(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
