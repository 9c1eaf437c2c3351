"""The field suite's own meter counts what a call allocates, and nothing else."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.field.counting_allocator import NoCompilerError, _compiled, peak_bytes

pytestmark = [pytest.mark.field, pytest.mark.slow]


def test_intermediates_that_live_together_count_and_results_do():
    x = torch.zeros(1000)
    assert peak_bytes(lambda: x.sin().exp()) == 8000


def test_what_is_freed_before_the_next_allocation_does_not_count():
    x = torch.zeros(1000)

    def step() -> None:
        for _ in range(3):
            x.sin()

    assert peak_bytes(step) == 4000


def test_what_lived_before_the_call_does_not_count():
    kept = [torch.zeros(1000) for _ in range(5)]
    assert peak_bytes(lambda: torch.zeros(10)) == 40
    assert len(kept) == 5


def test_a_backward_pass_in_another_thread_counts():
    x = torch.zeros(1000, requires_grad=True)
    loss = (x * 2).sum()
    assert peak_bytes(loss.backward) >= 4000


def test_without_a_compiler_the_suite_fails_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoCompilerError, match=r"neither g\+\+ nor clang\+\+"):
        _compiled(tmp_path)
