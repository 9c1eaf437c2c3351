"""What C++ knows of an operator, which it looks up once for the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from membudget.engine import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler")

# Each of two threads waits in the middle of the look-up until the other is there, too.
TWO_THREADS = """\
import threading
import torch
import membudget as mb
from membudget.engine.replay import accelerated

both_look = threading.Barrier(2)
operator_of = accelerated.operator_of

def slowly(name):
    if name == "aten::mul_.Tensor":
        both_look.wait(30)
    return operator_of(name)

def step(x):
    y = x + 1
    return y.mul_(2).sin().exp()

def gradient(function):
    x = torch.linspace(0, 1, 6, requires_grad=True)
    return torch.autograd.grad(function(x).sum(), x)[0]

region = mb.checkpoint(engine="replay", verify=False)(step)
accelerated.operator_of = slowly
threads = [threading.Thread(target=gradient, args=(region,)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
accelerated.operator_of = operator_of
print(not both_look.broken, torch.equal(gradient(region), gradient(step)))
"""


@pytest.mark.cpu_only("it starts a process of its own")
def test_two_threads_that_look_up_an_operator_at_once_know_it_as_one_would() -> None:
    command = [sys.executable, "-c", TWO_THREADS]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.stdout == "True True\n", run.stderr
