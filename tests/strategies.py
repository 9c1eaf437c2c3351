"""Hypothesis strategies: random programs, and random nestings of regions over them.

What is drawn is legal in a plain step, so that no example is thrown away: an in-place
operator writes only where autograd has nothing saved, and only into storages that were
made inside every region around it, because a region may not write into its inputs. The
strategy keeps track of that while it draws, storage by storage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.programs import (
    INPUTS,
    OPERATORS,
    Instruction,
    Operator,
    Passing,
    Program,
    Region,
)

# The same examples in each run; a failure then repeats without a data base.
# Without shrinking: a program as it was drawn can be read, and shrinking takes minutes.
generated = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

Draw = Callable[[st.SearchStrategy[Any]], Any]
Path = tuple[int, ...]  # The regions around an instruction, outermost first.
Node = Instruction | Region


_IN_PLACE = [operator for operator in OPERATORS if operator.in_place]
_PURE = [operator for operator in OPERATORS if not operator.in_place]


@dataclass
class _Storage:
    """What is known of one storage while a program is drawn.

    Attributes:
        path: The regions in which it was made.
        is_fixed: Whether autograd or a region may still read what it holds.
        trains: Whether it surely requires a gradient. (Where it does not, and a view
            of it is given one in place, autograd takes its other views for leaves.)
    """

    path: Path
    is_fixed: bool
    trains: bool


@dataclass
class _State:
    """The drawing of one program.

    Attributes:
        storages: The storage of each register.
        path: The regions around the next instruction.
        left: How many instructions may still be drawn.
        regions: How many regions there are.
    """

    storages: dict[int, _Storage]
    left: int
    path: Path = ()
    regions: int = 0
    written: list[set[int]] = field(default_factory=lambda: [set()])
    read: list[set[int]] = field(default_factory=lambda: [set()])

    def may_write_into(self, register: int) -> bool:
        """Return whether an in-place operator may change the register here."""
        storage = self.storages[register]
        made_inside = storage.path[: len(self.path)] == self.path
        return made_inside and storage.trains and not storage.is_fixed

    def note_read(self, register: int, is_saved: bool) -> None:
        """Note that an instruction reads a register."""
        storage = self.storages[register]
        storage.is_fixed |= is_saved or storage.path[: len(self.path)] != self.path
        for depth in range(1, len(self.path) + 1):
            if register not in self.written[depth]:
                self.read[depth].add(register)

    def note_written(self, register: int, storage: _Storage) -> None:
        """Note that an instruction writes a register."""
        self.storages[register] = storage
        for depth in range(1, len(self.path) + 1):
            self.written[depth].add(register)


@st.composite
def programs(draw: Draw, most_instructions: int = 14) -> Program:
    """Draw a program with regions over it."""
    trainable = (True, *draw(st.tuples(*[st.booleans()] * (INPUTS - 1))))
    leaves = {
        i: _Storage((), is_fixed=True, trains=trainable[i]) for i in range(INPUTS)
    }
    state = _State(leaves, draw(st.integers(3, most_instructions)))
    body: list[Node] = []
    while state.left:
        body.append(_node(draw, state))
    registers = sorted(state.storages)
    results = draw(
        st.lists(st.sampled_from(registers), min_size=1, max_size=3, unique=True)
    )
    # The last register is always used: most of the program then lies below the loss.
    return Program(tuple(body), trainable, tuple({*results, registers[-1]}))


def _node(draw: Draw, state: _State) -> Node:
    if len(state.path) < 4 and draw(st.integers(0, 2)) == 0:
        return _region(draw, state)
    return _instruction(draw, state)


def _region(draw: Draw, state: _State) -> Region:
    state.regions += 1
    state.path = (*state.path, state.regions)
    state.written.append(set())
    state.read.append(set())
    length = draw(st.integers(1, 5))
    body: list[Node] = [_node(draw, state)]
    while state.left and len(body) < length:
        body.append(_node(draw, state))
    state.path = state.path[:-1]
    reads = sorted(state.read.pop())
    writes = sorted(state.written.pop())
    passing: Passing = draw(st.sampled_from(get_args(Passing)))
    return Region(tuple(body), tuple(reads), tuple(writes), passing)


def _instruction(draw: Draw, state: _State) -> Instruction:
    state.left = max(0, state.left - 1)
    registers = sorted(state.storages)
    writable = [r for r in registers if state.may_write_into(r)]
    # Few registers may be written into, so it is done often where it can be.
    in_place = bool(writable) and draw(st.integers(0, 2)) == 0
    operator: Operator = draw(st.sampled_from(_IN_PLACE if in_place else _PURE))
    first = writable if in_place else registers
    operands = [draw(_recent(first))]
    operands += [draw(_recent(registers)) for _ in range(operator.operands - 1)]
    if operator.in_place and _share(state, operands):
        operands[1:] = [0] * (len(operands) - 1)
    for register in operands:
        state.note_read(register, "in" in operator.saves)
    target = operands[0] if operator.in_place else registers[-1] + 1
    storage = state.storages[operands[0]]
    if operator.in_place or operator.is_view:
        storage.is_fixed |= "out" in operator.saves
    else:
        # Some operators detach their first operand, none the last.
        trains = state.storages[operands[-1]].trains
        storage = _Storage(state.path, "out" in operator.saves, trains)
    state.note_written(target, storage)
    return Instruction(operator, tuple(operands), target)


def _recent(registers: Sequence[int]) -> st.SearchStrategy[int]:
    """Draw a register, the newest ones oftener, so that programs are deep."""
    return st.sampled_from(registers) | st.sampled_from(registers[-3:])


def _share(state: _State, operands: list[int]) -> bool:
    storage = state.storages[operands[0]]
    return any(state.storages[other] is storage for other in operands[1:])
