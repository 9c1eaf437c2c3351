"""Settings that C++ reads again only if one has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import membudget as mb
from membudget import _torch_settings
from membudget.engine.native import RERUN
from tests.settings import EXPRESSIONS, change, kept


@pytest.fixture
def extension() -> Iterator[Any]:
    mb.checkpoint(torch.sin, torch.ones(1, requires_grad=True))  # It binds.
    if not RERUN:
        pytest.skip("the extension has not been built")
    with kept():
        yield RERUN[0]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_setting_that_has_changed_is_read_again(extension, name):
    before = extension.settings()
    assert before == _torch_settings.read()
    change(name)
    assert extension.settings() == _torch_settings.read() != before


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="Python reads CUDA's")
def test_settings_that_have_not_changed_are_one_object(extension):
    assert extension.settings() is extension.settings()
