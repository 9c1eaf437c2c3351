"""The private names by which operators are observed do what they must."""

from __future__ import annotations

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
