"""Every differentiable operator of torch's table under a region, bit for bit as plain.

An operator is a row of `op_db`. Its samples are run in several types, layouts and forms
(`variants`), as plain and in each way of a region (`ways`), and compared (`compare`).
What plain refuses is not tried. A share of the operators, chosen by their names, runs
in each test run; the whole table is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.operators.checks import (
    SHARE_COMPARISON,
    WHOLE_COMPARISON,
    as_they_come,
    check,
)
from tests.operators.database import differentiable_operators, is_in_share
from tests.operators.variants import SHARE, WHOLE, variants_of

OPERATORS = differentiable_operators()
IN_SHARE = [info for info in OPERATORS if is_in_share(info.full_name)]

pytestmark = as_they_come


@pytest.mark.parametrize("info", IN_SHARE, ids=lambda info: info.full_name)
def test_an_operator_of_the_share_is_bit_for_bit_as_plain(
    info: Any, record_property: Callable[[str, object], None]
):
    variants = variants_of(info, SHARE)
    check(info.full_name, variants, SHARE_COMPARISON, record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("info", OPERATORS, ids=lambda info: info.full_name)
def test_an_operator_is_bit_for_bit_as_plain(
    info: Any, record_property: Callable[[str, object], None]
):
    variants = variants_of(info, WHOLE)
    check(info.full_name, variants, WHOLE_COMPARISON, record_property)
