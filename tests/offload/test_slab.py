"""Host memory: blocks never overlap, and all of it comes back."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import membudget as mb
from membudget.offload.slab import (
    ALIGNMENT,
    SMALLEST_PIECE,
    HostBlock,
    Slab,
    growing_pieces,
)

CPU = torch.device("cpu")


@given(
    size=st.integers(1, 4096),
    asked=st.lists(st.tuples(st.integers(1, 700), st.booleans()), max_size=40),
)
def test_blocks_keep_their_bytes_and_come_back(
    size: int, asked: list[tuple[int, bool]]
) -> None:
    slab = Slab(size, CPU)
    taken: list[tuple[int, HostBlock]] = []
    for number, (wanted, gives_back) in enumerate(asked):
        block = slab.take(wanted)
        if block is not None:
            assert block.content.nbytes == wanted
            block.content.fill_(number)
            taken.append((number, block))
        if gives_back and taken:
            slab.give_back(taken.pop(len(taken) // 2)[1])
        assert slab.used_bytes == sum(block.size for _, block in taken) <= size
        assert all((block.content == n % 256).all() for n, block in taken)
    for _, block in taken:
        slab.give_back(block)
    whole = size // ALIGNMENT * ALIGNMENT
    assert not whole or slab.take(whole) is not None


def test_the_smallest_part_that_fits_is_taken() -> None:
    slab = Slab(10 * ALIGNMENT, CPU)
    blocks = [slab.take(n * ALIGNMENT) for n in (3, 1, 1, 5)]
    assert None not in blocks
    for block in (blocks[0], blocks[2]):
        assert block is not None
        slab.give_back(block)
    small = slab.take(1)
    assert small is not None
    assert small.place == (0, 4 * ALIGNMENT)
    assert slab.take(4 * ALIGNMENT) is None


def test_a_slab_that_grows_doubles_up_to_its_bound() -> None:
    slab = Slab(5 * SMALLEST_PIECE, CPU, grows=True)
    assert slab.size == 0
    sizes = []
    for _ in range(5):
        assert slab.take(SMALLEST_PIECE) is not None
        sizes.append(slab.size // SMALLEST_PIECE)
    assert sizes == [1, 2, 4, 4, 5]
    assert slab.take(SMALLEST_PIECE) is None
    assert slab.used_bytes == slab.size == 5 * SMALLEST_PIECE


def test_a_slab_that_grows_gives_no_block_above_its_bound() -> None:
    slab = Slab(4096, CPU, grows=True)
    assert slab.take(8192) is None
    assert slab.take(1000) is not None
    assert slab.size <= 4096


def test_a_host_without_that_much_memory_says_so() -> None:
    with pytest.raises(mb.OptionError, match="the host cannot give"):
        Slab(1 << 60, CPU)


@pytest.mark.parametrize("bound", [SMALLEST_PIECE // 4, 5 * SMALLEST_PIECE])
def test_the_pieces_of_a_slab_that_grows_are_foreseen(bound: int) -> None:
    slab = Slab(bound, CPU, grows=True)
    while slab.take(4096 * 64) is not None:
        pass
    assert [piece.nbytes for piece in slab._pieces] == growing_pieces(bound)


def test_a_block_comes_back_while_another_is_taken() -> None:
    slab = Slab(2 * ALIGNMENT, CPU)
    block = slab.take(ALIGNMENT)

    with slab._lock:  # As when garbage is collected inside of `take`.
        dropping = Thread(target=slab.give_back, args=(block,), daemon=True)
        dropping.start()
        dropping.join(timeout=10)
        assert not dropping.is_alive()

    assert slab.used_bytes == 0
    assert slab.take(2 * ALIGNMENT) is not None
    assert slab.used_bytes == slab.most_used_bytes == 2 * ALIGNMENT
