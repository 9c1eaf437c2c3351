"""The sentences that are drawn to be read."""

from __future__ import annotations

import pytest

from tools.sentences import main, sentences_of

DOCSTRING = """Do this, e.g. that. Then (perhaps) more!

    code = drawn + here

A second paragraph
goes on. `name` begins a sentence.

Args:
    x: A number. It counts.
    y: Another,
        on two lines.

Example:
    >>> is_a("sentence")
    No sentence.
"""


def test_sentences_end_where_they_end_and_code_is_none():
    assert list(sentences_of(DOCSTRING)) == [
        "Do this, e.g. that.",
        "Then (perhaps) more!",
        "A second paragraph goes on.",
        "`name` begins a sentence.",
        "x: A number.",
        "It counts.",
        "y: Another, on two lines.",
    ]


def test_the_same_seed_draws_the_same_sentences(capsys: pytest.CaptureFixture[str]):
    texts = []
    for seed in ("abc123", "abc123", "abc124"):
        assert main(["--seed", seed, "--count", "5"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("5 of ")
