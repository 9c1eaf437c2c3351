"""Every module of torch's table under a region, bit for bit as plain.

A module is a row of `module_db`; it is compared as the operators in `test_table` are.
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
from tests.operators.database import is_in_share, modules
from tests.operators.module_variants import variants_of_module
from tests.operators.variants import SHARE, WHOLE

MODULES = modules()
IN_SHARE = [info for info in MODULES if is_in_share(info.name)]

pytestmark = as_they_come


@pytest.mark.parametrize("info", IN_SHARE, ids=lambda info: info.name)
def test_a_module_of_the_share_is_bit_for_bit_as_plain(
    info: Any, record_property: Callable[[str, object], None]
):
    variants = variants_of_module(info, SHARE)
    check(info.name, variants, SHARE_COMPARISON, record_property)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_a_module_is_bit_for_bit_as_plain(
    info: Any, record_property: Callable[[str, object], None]
):
    variants = variants_of_module(info, WHOLE)
    check(info.name, variants, WHOLE_COMPARISON, record_property)
