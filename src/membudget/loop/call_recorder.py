"""Record a call of the model that is about to run, without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from membudget._torch import without_dispatch_modes
from membudget.allocation import is_out_of_memory
from membudget.errors import OptionError
from membudget.loop.casts import CachedCasts
from membudget.loop.collectives import SendingError, nothing_sent
from membudget.loop.micro_batch import MicroBatchStep, RecordedBatch
from membudget.loop.regions import RegionSets
from membudget.loop.shards import without_shards
from membudget.planning import without_calls
from membudget.profile import Profile, profile_step
from membudget.profile.devices import Device
from membudget.progress import stage
from membudget.sharding import around_units, is_fully_sharded
from membudget.state.autocast import casts_kept
from membudget.step import Step


class UnrecordableError(Exception):
    """A micro-batch cannot be recorded on fake tensors."""


class CallRecorder:
    """Records calls of one model.

    Attributes:
        not_foreseen: Why the optimizer's step is in no recording; empty if it is, or if
            no optimizer was given.
        is_recording: Whether the model is called to be recorded now.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer | None,
        sets: RegionSets,
        casts: CachedCasts,
        device: Device | None = None,
    ):
        """Store the model, and the optimizer if it was given.

        Args:
            model: The model.
            optimizer: The optimizer.
            sets: The regions of the model.
            casts: The casts of its parameters that autocast caches.
            device: The device whose times are estimated; by default this processor.
        """
        self._device = device
        self.not_foreseen = ""
        self.is_recording = False
        self._model = model
        # In each recording or in none, to compare them.
        self._optimizer = optimizer
        self._sets, self._casts = sets, casts
        self._call: tuple[Any, Any] = ((), {})

    @contextmanager
    def about(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Know, in the context, with what the model is about to be called."""
        self._call = args, kwargs
        try:
            yield
        finally:
            self._call = (), {}

    def record(self) -> RecordedBatch:
        """Record the micro-batch that is about to run.

        Raises:
            UnrecordableError: If the model does not run on fake tensors.
        """
        with without_shards(self._model):
            step = MicroBatchStep(self._model, *self._call)
            found = self.recorded(step, self._optimizer)
        self._casts.direct_reads = max(self._casts.direct_reads, found.direct_reads)
        return found

    def recorded(self, step: Step, optimizer: Optimizer | None = None) -> RecordedBatch:
        """Record a call of the model, and the step of an optimizer if that can be.

        Raises:
            UnrecordableError: If the model does not run on fake tensors.
        """
        self._sets.clear()
        text = "recording a call of the model, without memory"
        self.is_recording = True
        try:
            # Modes of the user's would count operators that are not the loop's.
            with (
                without_dispatch_modes(),
                nothing_sent(self._model),
                casts_kept(),
                without_shards(self._model),
                stage(text),
            ):
                profile = self._profiled(step, optimizer)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, SendingError):
                raise
            raise UnrecordableError(f"{type(error).__name__}: {error}") from error
        finally:
            self.is_recording = False
        return RecordedBatch(profile, self._casts.names(), self._casts.are_there)

    def _profiled(self, step: Step, optimizer: Optimizer | None) -> Profile:
        if is_fully_sharded(self._model):
            self.not_foreseen = "fully_shard shards its parameters"
            profile = profile_step(step, None, True, self._device)
            return without_calls(profile, set(around_units(self._model)))
        if optimizer is not None:
            try:
                return profile_step(step, optimizer, True, self._device)
            except OptionError as error:  # LBFGS steps with a closure alone.
                self.not_foreseen = str(error)
        return profile_step(step, None, True, self._device)
