"""The private names by which operators are observed do what they must."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

import torch

from membudget import _torch_observing as names


def test_a_thread_that_includes_the_key_of_observers_calls_their_kernel():
    from membudget.observer import Observer

    class Seen(Observer):
        count = 0

        def observe(self, operator, args, kwargs):
            self.count += 1
            return operator(*args, **kwargs)

    x = torch.ones(2)
    with Seen() as seen:
        x.sin()
        assert seen.count == 1
        names.exclude_observers(True)
        assert names.is_observing_excluded()
        x.sin()
        names.exclude_observers(False)
        assert seen.count == 1
        with torch._C._DisableTorchDispatch():
            assert names.is_python_excluded()
        names.include_observers(False)
        x.sin()
        names.include_observers(True)
        assert seen.count == 1


def test_what_is_shared_with_autograd_is_found_in_this_thread():
    before = names.inherited_by_autograd()
    shared = [1]
    names.share_with_autograd(shared)
    assert names.inherited_by_autograd() is shared
    names.share_with_autograd(before)


def test_what_is_no_longer_shared_is_let_go_of():
    found: list[Any] = []

    def share() -> None:
        shared = torch.ones(1)
        names.share_with_autograd(shared)
        found.append(ref(shared))
        del shared
        assert found[0]() is not None
        names.share_with_autograd(None)
        names.share_with_autograd(None)
        found.extend([found[0](), names.inherited_by_autograd()])

    thread = threading.Thread(target=share)
    thread.start()
    thread.join()
    assert found[1:] == [None, None]


def test_operators_that_are_new_are_observed_too():
    from membudget.observer import Observer

    seen = []

    class Seen(Observer):
        def observe(self, operator, args, kwargs):
            seen.append(str(operator))
            return operator(*args, **kwargs)

    with Seen():
        pass
    library = torch.library.Library("membudget_new", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    with Seen():
        torch.ops.membudget_new.twice(torch.ones(2))
    assert seen[-1] == "membudget_new.twice.default"
    library._destroy()


def test_threads_that_begin_together_register_each_new_operator_once(monkeypatch):
    from membudget.observer import observed as kernel

    names.observe_operators(kernel)
    registered: list[str] = []
    second = threading.Thread(target=names.observe_operators, args=[kernel])

    def register(name: str, kernel: object) -> None:
        registered.append(name)
        if len(registered) == 1:
            second.start()
            second.join(0.1)  # It waits for us, if all is well.

    monkeypatch.setattr(names, "_observe_operator", register)
    library = torch.library.Library("membudget_together", "FRAGMENT")
    for name in ("one", "two"):
        library.define(f"{name}(Tensor x) -> Tensor")
    names.observe_operators(kernel)
    second.join()
    library._destroy()
    assert sorted(registered) == ["membudget_together::one", "membudget_together::two"]
