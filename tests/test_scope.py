"""A scope undoes everything, newest first, whatever happens."""

from __future__ import annotations

import contextlib

import pytest

from membudget.scope import Scope


def test_what_was_entered_is_left_newest_first():
    done: list[str] = []

    @contextlib.contextmanager
    def context(name):
        done.append(f"enter {name}")
        yield
        done.append(f"leave {name}")

    with Scope() as scope:
        scope.callback(done.append, "called")
        scope.enter_context(context("a"))
        scope.enter_context(context("b"))
        done.append("body")
    assert done == ["enter a", "enter b", "body", "leave b", "leave a", "called"]
    assert not scope


def test_an_undo_that_fails_keeps_no_other_from_being_done():
    done: list[str] = []

    def fail():
        raise ValueError("cannot be undone")

    scope = Scope()
    scope.callback(done.append, "first")
    scope.callback(fail)
    scope.callback(done.append, "last")
    with pytest.raises(ValueError, match="cannot be undone"), scope:
        done.append("body")
    assert done == ["body", "last", "first"]


def test_an_exception_of_the_body_passes_and_all_is_undone():
    done: list[str] = []
    scope = Scope()
    scope.callback(done.append, "undone")
    with pytest.raises(KeyError, match="body"), scope:
        raise KeyError("body")
    assert done == ["undone"]


def test_a_context_that_cannot_be_entered_is_not_left():
    left: list[str] = []

    class Refuses(contextlib.AbstractContextManager):
        def __enter__(self):
            raise ValueError("no entry")

        def __exit__(self, *error):
            left.append("left")

    with pytest.raises(ValueError, match="no entry"), Scope() as scope:
        scope.enter_context(Refuses())
    assert left == []
