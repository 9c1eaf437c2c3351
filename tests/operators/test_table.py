"""Torch's tables of operators and modules under a region, bit for bit as plain.

A row is a differentiable operator of `op_db` or a module of `module_db`. Its samples
are run in several types, layouts and forms (`variants`), as plain and in each way of a
region (`ways`), and compared (`compare`). What plain refuses is not tried. A share of
the rows, chosen by their names, runs in each test run; the whole table is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.operators.checks import (
    SHARE_COMPARISON,
    WHOLE_COMPARISON,
    as_they_come,
    check,
)
from tests.operators.database import differentiable_operators, is_in_share, modules
from tests.operators.module_variants import variants_of_module
from tests.operators.variants import SHARE, WHOLE, variants_of

ROWS: dict[str, Callable[..., Any]] = {
    **{op.full_name: partial(variants_of, op) for op in differentiable_operators()},
    **{info.name: partial(variants_of_module, info) for info in modules()},
}

pytestmark = as_they_come


@pytest.mark.parametrize("name", [name for name in ROWS if is_in_share(name)])
def test_a_row_of_the_share_is_bit_for_bit_as_plain(
    name: str, record_property: Callable[[str, object], None]
):
    check(name, ROWS[name](SHARE), SHARE_COMPARISON, record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_bit_for_bit_as_plain(
    name: str, record_property: Callable[[str, object], None]
):
    check(name, ROWS[name](WHOLE), WHOLE_COMPARISON, record_property)
