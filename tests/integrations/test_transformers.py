"""What the callback says where it cannot serve; tests/field trains with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import membudget as mb
from membudget.integrations import transformers


def test_without_transformers_the_callback_says_what_to_install(monkeypatch):
    monkeypatch.setattr(transformers, "TrainerCallback", None)
    with pytest.raises(mb.MissingExtraError, match=r'pip install "membudget\[hf\]"'):
        transformers.BudgetCallback("1GiB")


def test_an_unknown_choice_is_refused(monkeypatch):
    monkeypatch.setattr(transformers, "TrainerCallback", object)
    unknown: Any = "keep"
    with pytest.raises(mb.OptionError, match="own_checkpointing must be"):
        transformers.BudgetCallback("1GiB", own_checkpointing=unknown)


def test_the_library_is_imported_without_transformers():
    code = "import sys, membudget.loop; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
