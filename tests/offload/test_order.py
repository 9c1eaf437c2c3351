"""A step that saves storages of the same sizes asks for them in the same order."""

from __future__ import annotations

from membudget.offload.order import MOST_KNOWN, Order


def step(order: Order, sizes: list[int], asked: list[int]) -> list[set[int]]:
    """Run a step; return what was to be kept as each storage was saved."""
    order.begin_step()
    kept = []
    for size in sizes:
        order.save(size)
        kept.append(order.kept)
    for number in asked:
        order.ask(number)
    return kept


def test_the_first_step_knows_nothing() -> None:
    order = Order(keep_bytes=100)
    assert step(order, [10, 20], []) == [set(), set()]
    assert list(order.coming()) == []


def test_what_is_asked_for_first_is_kept_up_to_the_bytes_given() -> None:
    order = Order(keep_bytes=60)
    sizes, asked = [10, 20, 30, 40], [3, 1, 2, 0]
    step(order, sizes, asked)
    assert step(order, sizes, asked) == [{1, 3}] * 4


def test_what_lives_anyway_takes_no_room() -> None:
    order = Order(keep_bytes=60)
    step(order, [10, 20, 30, 40], [3, 1, 2, 0])
    order.now.living.add(3)
    assert step(order, [10, 20, 30, 40], [])[0] == {1, 2, 0}


def test_what_comes_next_is_what_was_not_asked_for_yet() -> None:
    order = Order(keep_bytes=0)
    step(order, [1, 1, 1, 1], [2, 0, 3, 1, 0])
    step(order, [1, 1, 1, 1], [3])
    assert list(order.coming()) == [2, 0, 1]
    order.ask(2)
    assert list(order.coming()) == [0, 1]


def test_a_step_of_other_sizes_is_unknown_until_it_has_run() -> None:
    order = Order(keep_bytes=0)
    step(order, [1, 2], [1, 0])
    step(order, [1, 3], [])
    assert list(order.coming()) == []
    order.ask(0)
    step(order, [1, 2], [])
    assert list(order.coming()) == [1, 0]
    step(order, [1, 3], [])
    assert list(order.coming()) == [0]


def test_a_longer_step_that_begins_alike_is_not_the_shorter_one() -> None:
    order = Order(keep_bytes=0)
    step(order, [1, 2], [1, 0])
    step(order, [1, 2, 3], [])
    assert order.expected is None


def test_old_steps_are_forgotten() -> None:
    order = Order(keep_bytes=0)
    for size in range(MOST_KNOWN + 2):
        step(order, [size, 1], [1, 0])
    step(order, [0, 1], [])
    assert order.expected is None
    step(order, [2, 1], [])
    assert order.expected is not None
