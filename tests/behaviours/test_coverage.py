"""Every behaviour that is listed for activation checkpointing has a test.

The list counts 145 behaviours. A test names its own: `test_b07_...` is of behaviour 7.
The tests are read, not imported, so that this holds whatever is installed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

LISTED = range(1, 146)

EXCEPTED = {
    27: "an output that always requires grad is better not had",
    55: "binomial schedules come with the planner",
    92: "in-place operators after a saved one come with the replay engine",
    94: "policies that name tensors come with the replay engine",
    95: "a policy inside a plain region comes with the replay engine",
    96: "a second backward under a policy comes with the replay engine",
    97: "a second backward under a policy comes with the replay engine",
    98: "refusing bad policies comes with the replay engine",
    99: "hooks that see what a policy saves come with the replay engine",
    100: "policies by name and class come with the replay engine",
    101: "policies for a budget come with the planner",
}


def numbers_with_a_test() -> set[int]:
    """Return the numbers of the behaviours that a test function names."""
    numbers = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found = re.match(r"test_b(\d+)_", node.name)
                if found:
                    numbers.add(int(found[1]))
    return numbers


def test_every_behaviour_has_a_test_or_a_reason_to_have_none() -> None:
    assert set(LISTED) - numbers_with_a_test() - EXCEPTED.keys() == set()


def test_no_test_names_a_behaviour_that_is_not_listed() -> None:
    assert numbers_with_a_test() - set(LISTED) == set()
