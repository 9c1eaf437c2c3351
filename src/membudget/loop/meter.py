"""Measure the peak of one micro-batch while the user's loop runs it.

    begin()           mark("outputs")    mark("backward")    mark("step")       end()
    ├── model's forward ──┤├── loss: the tail ──┤├── backward ──┤├── optimizer's step ─┤

                      or another model's forward or backward pass ("others") ──┘

Peaks begin anew at each mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import torch

from membudget._torch import is_any_autocast_enabled
from membudget._torch_accelerator import is_on_accelerator
from membudget.memory.allocator import at_rest
from membudget.memory.counting import Counted

_NUMBERS = count(1)

Mark = Literal["outputs", "backward", "others", "step", "end"]

_ENDS = ("others", "step", "end")
"""Where a micro-batch ends: at the first of these."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a micro-batch took.

    Attributes:
        peak_bytes: Peak of the bytes allocated from the call of the model until the
            optimizer steps, or a model of the budget is called again. On an
            accelerator, of those that are reserved for them.
        tail_bytes: The same between forward and backward of the model, above what was
            live when the model returned; `None` if no backward pass began.
        is_in_autocast: Whether the backward pass began in autocast.
        step_bytes: The peak since "step", above what was live then; `None` without it.
    """

    peak_bytes: int
    tail_bytes: int | None
    is_in_autocast: bool = False
    step_bytes: int | None = None


class PeerRoom(NamedTuple):
    """What another model must leave for a micro-batch that runs inside its own.

    Attributes:
        spare_bytes: By how much a smaller plan would lower the peak.
        need_bytes: What is asked for the smallest, which may be more than it takes.
    """

    spare_bytes: int = 0
    need_bytes: int = 0


class _At(NamedTuple):
    bounded_bytes: int  # Peaks since the mark before.
    peak_bytes: int  # Likewise; no less than what a model inside is expected to need.
    live_bytes: int
    is_in_autocast: bool
    keeps_graph: bool  # Of "backward": a later backward pass goes through this one.


class BatchMeter:
    """Measures one micro-batch at a time, on one device.

    Attributes:
        peers: The meters of the models in one budget. Where the backward pass of one
            model begins, that of a model that was called on its outputs has ended.
            The first model must leave what such a model's smallest plan is expected to
            take, but not what it keeps by choice. A model that is called after
            another's backward pass is no part of that.
    """

    def __init__(self, counted: Counted):
        """Use the counts of a device."""
        self.peers: Sequence[BatchMeter] = ()
        self._counted = counted
        self._marks: dict[str, _At] | None = None
        self._before_bytes = self._live_bytes = self._number = 0
        self._room: Callable[[], PeerRoom] = PeerRoom

    def begin(self, room: Callable[[], PeerRoom]) -> None:
        """Begin to measure a micro-batch, if the device's bytes are counted.

        Args:
            room: Returns what is needed for it inside another model's.
        """
        if not self._counted.is_exact:
            return
        self._counted.restart()  # Peers note their peaks before the device's is reset.
        if is_on_accelerator(self._counted.device):
            at_rest(self._counted.device)  # So that what is reserved is for this alone.
        self._before_bytes, _ = self._counted.bounded_bytes()
        self._live_bytes = self._counted.live_bytes()
        self._number = next(_NUMBERS)
        self._room = room
        self._marks = {}

    def mark(self, what: Mark) -> bool:
        """Note that a part of the micro-batch has ended; only its first end counts.

        Returns:
            Whether it was that.
        """
        is_first = self._marks is not None and what not in self._marks
        if self._marks is not None and is_first:
            inner = self._inner() if what == "backward" else []
            counted = self._counted
            here = [peer for peer in inner if peer._counted.device == counted.device]
            rooms = [(peer, peer._room()) for peer in here]
            spare_bytes = sum(room.spare_bytes for _, room in rooms)
            _, bounded_bytes = counted.bounded_bytes()
            actual_bytes = counted.peak_bytes() - spare_bytes
            needed_bytes = [p._live_bytes + room.need_bytes for p, room in rooms]
            self._marks[what] = _At(
                bounded_bytes - spare_bytes,
                max([actual_bytes, *needed_bytes]),
                counted.live_bytes(),
                is_any_autocast_enabled(),
                torch.is_grad_enabled(),
            )
            counted.restart()
            for peer in inner:
                peer.mark("others")
        return is_first

    def end_others(self) -> None:
        """Note that this model is called, so that those before it are done."""
        for peer in self.peers:
            backward = (peer._marks or {}).get("backward")
            if peer is not self and backward and not backward.keeps_graph:
                peer.mark("others")

    def _inner(self) -> list[BatchMeter]:
        """Return the peers whose backward pass was between this forward and now."""
        return [
            peer
            for peer in self.peers
            if peer._number > self._number and "backward" in (peer._marks or ())
        ]

    def drop(self) -> None:
        """Stop measuring; nothing is learnt from a micro-batch that fails."""
        self._marks, self._room = None, PeerRoom

    def end(self) -> Measured | None:
        """Stop measuring; return what the micro-batch took, if it was measured."""
        self.mark("end")
        marks = self._marks
        self.drop()
        if marks is None:
            return None
        step_bytes = None
        if "step" in marks:
            step_bytes = marks["end"].peak_bytes - marks["step"].live_bytes
        # No plan of this model changes what comes after.
        end = next(what for what in marks if what in _ENDS)
        parts = [marks[what] for what in ("outputs", "backward", end) if what in marks]
        peak_bytes = max(at.bounded_bytes for at in parts)
        tail_bytes, is_in_autocast = None, False
        # An earlier call's backward pass may begin while the model is called.
        if "outputs" in marks and "backward" in marks:
            tail_bytes = marks["backward"].peak_bytes - marks["outputs"].live_bytes
            is_in_autocast = marks["backward"].is_in_autocast
        took_bytes = peak_bytes - self._before_bytes
        return Measured(took_bytes, tail_bytes, is_in_autocast, step_bytes)
