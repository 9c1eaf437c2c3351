"""The private names by which random numbers are set do what they must."""

from __future__ import annotations

import subprocess
import sys

# A kernel that covers an operator stays for good: each test has a process of its own.
HALVED = """
import threading
import torch
from membudget._torch_drawing import below, cover

def halved(keys, tensor, low=0.0, high=1.0, **kwargs):
    below(torch.ops.aten.uniform_.default, keys, tensor, low, high, **kwargs)
    return below(torch.ops.aten.fill_.Scalar, keys, tensor, 0.5)

x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
expected = torch.nn.functional.group_norm(x, 2)
cover({"uniform_": halved})
cover({"uniform_": None})
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", HALVED + code], check=True)


def test_a_kernel_covers_an_operator_and_all_that_call_it_in_every_thread():
    run("""
assert torch.rand(()) == 0.5
assert torch.rand_like(torch.zeros(1)) == 0.5
assert torch.zeros(1).uniform_(2, 3) == 0.5
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.rand(()).item()))
thread.start()
thread.join()
assert seen == [0.5]
""")


def test_operators_that_are_not_covered_compute_as_before():
    # Composite kernels on a backend's key in its place would refuse these strides.
    run("""
assert torch.equal(torch.nn.functional.group_norm(x, 2), expected)
""")
