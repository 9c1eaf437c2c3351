"""The private names by which random numbers are set do what they must."""

from __future__ import annotations

import threading

import torch

from membudget._torch_drawing import below, cover


def halved(keys, tensor, low=0.0, high=1.0, **kwargs):
    below(torch.ops.aten.uniform_.default, keys, tensor, low, high, **kwargs)
    return below(torch.ops.aten.fill_.Scalar, keys, tensor, 0.5)


def test_a_kernel_covers_an_operator_and_all_that_call_it_until_it_is_undone():
    uncover = cover({"uniform_": halved})
    assert torch.rand(()) == 0.5
    assert torch.rand_like(torch.zeros(1)) == 0.5
    assert torch.zeros(1).uniform_(2, 3) == 0.5
    uncover()
    assert (torch.rand(20) != 0.5).any()


def test_a_kernel_covers_an_operator_in_every_thread():
    seen = []
    uncover = cover({"uniform_": halved})
    thread = threading.Thread(target=lambda: seen.append(torch.rand(()).item()))
    thread.start()
    thread.join()
    uncover()
    assert seen == [0.5]


def test_what_covers_nothing_computes_as_before():
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    # Composite kernels that stood on the key in its place would refuse these strides.
    expected = torch.nn.functional.group_norm(x, 2)
    uncover = cover({"uniform_": halved})
    assert torch.equal(torch.nn.functional.group_norm(x, 2), expected)
    uncover()
