"""Byte sizes as people write and read them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from membudget.errors import OptionError
from membudget.text import dtype_name, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        (" 1.5e9 ", 1_500_000_000),
        ("1e3KB", 1_000_000),
        ("1_000", 1000),
        (".5KiB", 512),
        ("0.1B", 0),
        ("0", 0),
        (4096, 4096),
        (1.5e9, 1_500_000_000),
    ],
)
def test_a_size_is_parsed(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a size is a number of bytes"),
        ("GiB", "a size is a number of bytes"),
        ("-1", "a size is a number of bytes"),
        ("8,5GiB", "a size is a number of bytes"),
        ("nan", "a size is a number of bytes"),
        (float("inf"), "a size is a number of bytes"),
        (True, "a size is a number of bytes"),
        ("8G", "has the unit 'G'; write GiB"),
        ("8 bananas", "has the unit 'bananas'"),
        ("1e99", "more than any memory has"),
        ("1" * 60, "more than any memory has"),
    ],
)
def test_invalid_sizes_are_rejected(text, message):
    with pytest.raises(OptionError, match=message):
        parse_bytes(text)


@given(st.integers(0, 1 << 59))
def test_bytes_are_read_unchanged_written(size):
    read = parse_bytes(format_bytes(size))

    # One decimal is shown, of a number of at least 1.
    assert abs(read - size) <= size * 0.05
    assert parse_bytes(size) == parse_bytes(f"{size}B") == size


@given(st.integers(0, 1 << 60), st.integers(0, 1 << 60))
def test_more_bytes_are_never_shown_as_less(one, other):
    small, large = sorted((one, other))
    shown = [parse_bytes(format_bytes(size)) for size in (small, large)]

    assert shown == sorted(shown)


def test_a_dtype_is_named_without_its_module():
    assert dtype_name(torch.bfloat16) == "bfloat16"
