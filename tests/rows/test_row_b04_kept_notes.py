"""Row B4: an error that reports a failed allocation says what the plan keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.allocation import note_shortage
from tests.planner.models import gpt
from tests.rows.test_row_b04_out_of_memory import FailsAtOne, Short, layers

KEEPS = "membudget: memory ran out under a plan for "


def fitted() -> tuple[nn.Module, Tensor, mb.Fitted]:
    torch.manual_seed(0)
    model, ids = gpt()
    return model, ids, mb.fit(model, ids, "80%", mode="selective", measure="none")


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


def test_a_forward_under_a_plan_says_what_is_kept_and_by_whom():
    model, ids, found = fitted()
    with (
        FailsAtOne(12),
        pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught,
    ):
        model(ids)
    found.remove()
    (note,) = notes_of(caught.value)
    assert note.startswith(KEEPS)
    assert f"{found.plan.budget_bytes:,} bytes above" in note
    assert f"predicted to take {found.plan.peak_bytes:,}. Its regions keep" in note
    assert all(f"'{region.path}' " in note for region in found.plan.regions[:4])
    assert note.endswith("Use a smaller batch")


def test_a_backward_pass_in_the_context_says_it_too():
    model, ids, found = fitted()

    def train() -> None:
        with found:
            loss = model(ids).square().mean()
            with FailsAtOne(4):
                loss.backward()

    with pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught:
        train()
    (note,) = notes_of(caught.value)
    assert note.startswith(KEEPS)


def test_the_host_s_failure_is_known_and_another_error_has_no_note():
    _, _, found = fitted()
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    with pytest.raises(RuntimeError, match="DefaultCPU") as caught, found:
        raise RuntimeError(text)
    assert len(notes_of(caught.value)) == 1
    with pytest.raises(RuntimeError, match="mine") as caught, found:
        raise RuntimeError("mine")
    assert notes_of(caught.value) == []


def test_a_step_that_fit_tries_says_what_its_plan_keeps():
    model = layers(Short())
    with pytest.raises(mb.OutOfMemoryError, match="whose plan takes") as caught:
        mb.fit(model, torch.randn(64, 16), "70%")
    (note,) = notes_of(caught.value)
    assert note.startswith("membudget: memory ran out under a plan")


def test_after_the_plan_is_removed_an_error_says_nothing_of_it():
    model, ids, found = fitted()
    found.remove()
    with (
        FailsAtOne(12),
        pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught,
    ):
        model(ids)
    assert notes_of(caught.value) == []


def test_one_note_is_enough_and_none_takes_the_place_of_the_error():
    error = MemoryError("on purpose")
    note_shortage(error, "first")
    note_shortage(error, "second")
    assert notes_of(error) == ["membudget: first"]

    def fails() -> str:
        raise MemoryError("of the note")

    other = MemoryError("on purpose")
    note_shortage(other, fails)
    assert notes_of(other) == []


def test_what_says_it_keeps_neither_model_nor_batch_alive():
    model, ids, found = fitted()
    alive: list[Any] = [weakref.ref(ids), weakref.ref(model)]
    with (
        FailsAtOne(12),
        pytest.raises(torch.OutOfMemoryError, match="no memory is left") as caught,
    ):
        model(ids)
    note = notes_of(caught.value)
    del caught, found, model, ids
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert note
