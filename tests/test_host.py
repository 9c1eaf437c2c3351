"""What `fit` is given of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import membudget as mb
from membudget.errors import OptionError
from membudget.host import AskedHost, Rates, asked_host
from membudget.offload.extents import Extents
from membudget.planner.moved import ALIGNMENT, Host
from membudget.profile.devices import DEVICES
from tests.planner.drafts import chain_of

CPU = torch.device("cpu")


@pytest.mark.cpu_only("where tensors are in the host's memory already")
def test_a_model_on_the_cpu_has_nothing_to_move():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptionError, match="host='1GiB' is for a model on an accelerat"):
        mb.fit(model, torch.ones(2, 4), "80%", host="1GiB")
    fitted = mb.fit(model, torch.ones(2, 4), "100%", host="1GiB", offload=False)
    fitted.remove()
    with pytest.raises(OptionError, match="host='1GiB' is for a model on an accelerat"):
        mb.budget(model, "1GiB", host="1GiB")
    with mb.budget(model, "1GiB", host="1GiB", offload=False):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("host", "offload", "words"),
    [
        ("8parsec", "auto", "unit 'parsec'"),
        (0, "auto", "host must be a number of bytes above 0; got 0"),
        ("1GiB", "always", "offload must be 'auto' or False; got 'always'"),
    ],
)
def test_nonsense_is_refused(host: Any, offload: Any, words: str):
    with pytest.raises(OptionError, match=words):
        asked_host(host, offload, CPU)


def test_without_host_memory_nothing_is_moved():
    assert asked_host(None, "auto", CPU) is None
    assert asked_host("1GiB", False, CPU) is None


def test_where_times_are_estimated_the_link_is_that_of_the_device():
    rate = DEVICES["h100"].link_bytes_per_s
    assert asked_host(4096, "auto", CPU, "h100") == AskedHost(
        4096, Rates(rate, rate, 0.0)
    )


def test_the_first_window_to_try_has_room_for_two_tensors():
    given = AskedHost(4096, Rates(2.0, 4.0, 0.5))
    graph = chain_of([100, 300, 100], [1.0, 1.0, 1.0])
    assert given.serving(graph) == Host(4096, 600, 2.0, 4.0, 0.5)


@pytest.mark.parametrize(
    ("used", "allocated"), [(0, 1), (7, 8), (8, 10), (1000, 1024), (1 << 20, 5 << 18)]
)
def test_host_memory_is_allocated_in_a_few_pieces_within_what_is_given(
    used: int, allocated: int
):
    host = Host(1 << 30, 0, 1.0, 1.0)
    assert host.allocated_bytes(used, 0) == allocated
    assert bin(allocated).count("1") <= 3
    assert Host(used, 0, 1.0, 1.0).allocated_bytes(used, 0) == used


@pytest.mark.parametrize("count", [1, 3, 9, 100])
def test_as_many_storages_find_room_in_the_host_memory_that_is_allocated(count: int):
    size = 3 << 14  # It fills no power of two.
    host = Host(1 << 30, 0, 1.0, 1.0)
    allocated, pieces = host.allocated_bytes(count * size, size), Extents(ALIGNMENT)
    for power in range(allocated.bit_length()):
        if allocated >> power & 1:
            pieces.add(power, 1 << power)
    assert None not in [pieces.take(size) for _ in range(count)]
