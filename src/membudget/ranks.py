"""What the ranks that train one model do together: share a decision, end with a reason.

A collective that one rank does not run makes the others wait for it. So all ranks run
the same steps: what decides about the next one is made of the numbers of all, or by
rank 0 alone. A rank that fails within a step leaves the others waiting until its
process ends; it tells them why through the store by which the ranks have met.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module

from membudget._torch_distributed import common_store
from membudget.allocation import is_out_of_memory
from membudget.errors import MembudgetError, RankError
from membudget.sharding import replicas_of, sharding_of

T = TypeVar("T")

_REASON = "membudget/left"
"""Key of the store under which the first rank that fails writes its number and why."""


class Ranks:
    """All ranks of a process group, seen from one of them.

    Attributes:
        rank: Number of this rank.
        count: Number of ranks.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        """Find the ranks, by default those of the default group.

        Numbers are compared on `device`, as the group asks for.
        """
        forget_reason()
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._group = device, group

    @classmethod
    def of(cls, model: Module, device: torch.device) -> Ranks | None:
        """Return the ranks that train a model together; `None` if it is trained alone.

        They do if its parameters are sharded, or DDP averages its gradients.
        """
        if sharding_of(model) is None and replicas_of(model) == 1:
            return None
        return cls(device) if dist.get_world_size() > 1 else None

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' integers, place by place."""
        return self._largest(torch.tensor(numbers, dtype=torch.int64))

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the most seconds of all ranks, place by place."""
        return self._largest(torch.tensor(seconds, dtype=torch.float64))

    def _largest(self, own: torch.Tensor) -> list[Any]:
        numbers = own.to(self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group)
        found: list[Any] = numbers.tolist()
        return found

    def of_all(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank; each can be pickled."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, self._group)
        return values

    def shared(self, make: Callable[[], T]) -> T:
        """Let rank 0 make something, and return that on all ranks.

        Raises:
            MembudgetError: The one that `make` raises on rank 0, on all ranks.
            RankError: On the others, if it raises another error.
        """
        sent: list[Any] = [None, None]
        if self.rank == 0:
            try:
                sent = [make(), None]
            except MembudgetError as error:
                sent = [None, _packed(error)]
            except Exception as error:
                self._broadcast([None, _packed(RankError(0, _text(error)))])
                raise
        self._broadcast(sent)
        made, failed = sent
        if failed is not None:
            raise _unpacked(failed)
        return made  # type: ignore[no-any-return]

    def _broadcast(self, values: list[Any]) -> None:
        dist.broadcast_object_list(values, group=self._group, group_src=0)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run what has collectives; if a rank fails and its process ends, all fail.

        The process group cannot be used any more then, because its ranks have run
        different collectives.

        Raises:
            RankError: On the ranks that waited for the one that failed, with its
                reason. That one raises its own error.
        """
        try:
            yield
        except Exception as error:
            self._end(error, what)

    def _end(self, error: Exception, what: str) -> NoReturn:
        first = _first_reason(f"{self.rank} {_text(error)}")
        if first is None:
            raise RankError(None, _text(error), what) from error
        rank, _, why = first.partition(" ")
        if int(rank) == self.rank:
            error.add_note(
                f"rank {rank} failed {what}, and the other ranks wait for it until its "
                "process ends: end it, and start the processes again"
            )
            raise error
        raise RankError(int(rank), why, what) from error


def note_reason(error: BaseException) -> None:
    """Tell the other ranks why this one leaves its loop, or note why another has left.

    A reason is an error of membudget, or that memory ran out. Those that wait for a
    rank whose process has ended get an error that says so, and not why.
    """
    if isinstance(error, MembudgetError) or is_out_of_memory(error):
        first = _first_reason(f"{dist.get_rank()} {_text(error)}")
        text = "the other ranks wait for this one until its process ends: end it"
    elif isinstance(error, RuntimeError):
        first, text = _known_reason(), ""
    else:
        return
    rank, _, why = (first or "").partition(" ")
    if rank and int(rank) != dist.get_rank():
        text = f"rank {rank} left before: {why}"
    if text:
        error.add_note(f"{text}, and start the processes again")


def forget_reason() -> None:
    """Delete the reason why this rank failed before: it begins anew, so it recovered.

    Only this rank does, so that no reason is deleted that another has just written.
    """
    rank = (_known_reason() or "").partition(" ")[0]
    if rank == str(dist.get_rank()):
        common_store().delete_key(_REASON)


def _known_reason() -> str | None:
    """Return why the first rank has failed, if one has and the store is still there."""
    try:
        store = common_store()
        return str(store.get(_REASON), "utf-8") if store.check([_REASON]) else None
    except Exception:
        return None


def _first_reason(mine: str) -> str | None:
    """Return why the first rank has failed, which is this one if none did before.

    It is unknown where the store has gone with the process of that rank.
    """
    try:
        first: bytes = common_store().compare_set(_REASON, "", mine)
    except Exception:
        return None
    return first.decode()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _packed(error: MembudgetError) -> bytes:
    # Classes whose constructors take other arguments than `args` cannot be pickled.
    return pickle.dumps((type(error), error.args, error.__dict__))


def _unpacked(packed: bytes) -> MembudgetError:
    kind, args, attributes = pickle.loads(packed)
    error: MembudgetError = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error
