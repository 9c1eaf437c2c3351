"""Check that calls of a replay region run verified operators; verify new sequences.

A *path* is the operator sequence of a verified call. A call is verified from the first
operator at which it deviates from all verified sequences (Rule 8): `verify` compares
the original tensors, and also corrects the current step; `fingerprinted` compares
fingerprints. Other checks detect saved tensors that are overwritten before the backward
pass, and replay inputs that change between forward and replay (Rule 5).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from membudget._torch import without_dispatch_modes
from membudget.engine.held import Hooks, Packed
from membudget.engine.messages import MODIFIED, overwritten_error
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.replay.fingerprinted import BackwardComparison, Fingerprinter
from membudget.engine.replay.offloaded import Offloaded
from membudget.engine.replay.recorder import Recorder
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tape import ReplayHandle, TapeValue
from membudget.engine.replay.verified import Verified
from membudget.engine.replay.verify import Originals, keep_if_other
from membudget.errors import OverwrittenWarning
from membudget.state.bits import (
    Fingerprint,
    content_of,
    has_bits,
    is_subclass,
    sample_of,
)
from membudget.state.copies import copy_of
from membudget.state.identity import SavedVersion, address_of, version_of


class Checks:
    """Verification and change detection for one call of a replay region."""

    __slots__ = (
        *("_comparison", "_is_strict", "_originals", "_statistics"),
        *("verified", "_verify", "recorder"),
    )

    def __init__(
        self,
        recorder: Recorder,
        options: RegionOptions,
        verified: Verified | None,
        statistics: Statistics | None,
    ):
        """Create the checks for one region call; `verified=None` disables them."""
        self.recorder: Recorder | None = recorder  # `None` once the forward has ended.
        self._verify = options.verify
        self._is_strict = options.strict
        self.verified = verified
        self._statistics = statistics
        self._originals: Originals | None = None
        self._comparison: BackwardComparison | None = None
        if verified is not None:
            self._begin(recorder, verified)

    # The path.

    def _begin(self, recorder: Recorder, verified: Verified) -> None:
        recording = recorder.recording
        recording.left_path = self._leave_path
        if verified.paths and not verified.is_pending:
            # The newest path is the likeliest; `_leave_path` tries the others.
            recording.path = verified.paths[-1]
            sampling = verified.sampling
            is_due = sampling is not None and sampling.is_due
            if is_due or self._verify == "always":
                self._verify_from_here(recorder, by_fingerprints=True)
        else:
            recording.taken = []
            self._verify_from_here(recorder, self._verify is not True)

    def _leave_path(self) -> None:
        """Follow another verified operator sequence, or verify the rest of the call."""
        recorder, verified = self.recorder, self.verified
        assert recorder is not None
        assert verified is not None
        recording = recorder.recording
        taken = recording.taken or ()
        other = verified.along(taken) or verified.spliced(taken)
        if other is not None:
            recording.path, recording.taken = other, None
            return
        self._verify_from_here(recorder, self._verify is not True)
        # Inputs of the operator that left the path, saved before it was observed.
        for handle, tensor in recording.recent:
            self._add(recorder, handle, tensor)

    def _verify_from_here(self, recorder: Recorder, by_fingerprints: bool) -> None:
        recorder.recording.tracker.writes = self._before_write
        if not by_fingerprints:
            self._originals = Originals()
        elif recorder.fingerprinter is None:
            recorder.fingerprinter = Fingerprinter()

    def _before_write(self, address: int) -> None:
        """Copy or fingerprint saved tensors before their storage is overwritten."""
        assert self.recorder is not None
        for noted in (self._originals, self.recorder.fingerprinter):
            if noted is not None:
                noted.before_write(address)

    @property
    def is_sampled(self) -> bool:
        """Whether a sample of what the call reads is compared in its backward."""
        return self.verified is not None and self.verified.is_sampled

    def is_quiet(self) -> bool:
        """Return whether this call verifies nothing that it computes."""
        recorder, verified = self.recorder, self.verified
        assert recorder is not None
        if recorder.sees_subclasses or self._is_strict:
            return False
        if verified is None:
            return True
        is_new = recorder.recording.path is None or recorder.fingerprinter is not None
        return not (is_new or verified.unrepeatable)

    # Saved tensors.

    def note(self, recorder: Recorder, handle: ReplayHandle, tensor: Tensor) -> None:
        """Register a saved tensor and its handle for the checks that are enabled."""
        recording = recorder.recording
        if recording.path is not None:
            recording.recent.append((handle, tensor))
        if self._originals is not None or recorder.fingerprinter is not None:
            self._add(recorder, handle, tensor)
        verified = self.verified
        if verified is not None and is_subclass(tensor):
            verified.has_subclasses = True
        # Later calls on a verified path skip this check, to save time.
        is_first = verified is not None and recording.path is None
        if is_first or self._is_strict:
            handle.saved_version = _saved_version(tensor)

    def _add(self, recorder: Recorder, handle: ReplayHandle, tensor: Tensor) -> None:
        if self._originals is not None:
            self._originals.add(handle, tensor)
        elif recorder.fingerprinter is not None:
            recorder.fingerprinter.add(handle, tensor)

    def inside(
        self,
        recorder: Recorder,
        handle: ReplayHandle,
        replayer: Replayer,
        take: Callable[[], Tensor],
    ) -> Tensor:
        """Return what a backward pass inside the forward asks for.

        That is the original tensor while verification holds it, because a replay that
        is not verified yet might miss hidden writes. Nothing compares a fingerprinted
        one later, when its graph may be gone: its replay is compared at once.
        """
        verified, originals = self.verified, self._originals or recorder.fingerprinter
        original = None if originals is None else originals.of(handle)
        if original is None:
            tensor = take()
            if handle.fingerprint is not None and verified is not None:
                BackwardComparison(verified, ()).check(handle, tensor, replayer)
            return tensor
        if self._originals is None and verified is not None:
            tracker, unrepeatable = recorder.recording.tracker, verified.unrepeatable
            if keep_if_other(handle.value, original, take, tracker, unrepeatable):
                replayer.release()
                self._count_unrepeatable(verified)
        return original

    # Recomputed tensors.

    def finish(
        self, recorder: Recorder, replayer: Replayer
    ) -> Callable[[Tensor], Fingerprint] | None:
        """Verify dropped tensors, or schedule verification for the backward pass.

        Return a function that fingerprints replay inputs (all elements if originals
        were retained, else a sample), or `None` if contents are not compared.
        """
        verified = self.verified
        self.recorder = None
        if verified is None:
            return None
        recording = recorder.recording
        path = recording.path or tuple(recording.taken or ())
        ran = path[: recording.number]
        originals, self._originals = self._originals, None
        if originals is not None:
            originals.compare(replayer, recording.tracker, verified.unrepeatable)
            self._count_unrepeatable(verified)
            verified.add(ran)
        elif recorder.fingerprinter is not None and recorder.fingerprinter.taken:
            self._comparison = BackwardComparison(verified, ran)
        elif recording.path is None:
            verified.add(ran)  # Nothing was dropped.
        elif ran not in verified.paths:
            if path in verified.paths:
                # It ended partway along the path.
                verified.is_pending = True
            else:
                verified.add(ran)  # It was spliced.
        if originals is not None:
            return content_of
        return sample_of if verified.is_sampled else None

    def check(self, handle: ReplayHandle, tensor: Tensor, replayer: Replayer) -> None:
        """Compare a recomputed tensor with its fingerprint from the forward."""
        if self._comparison is None:
            return
        try:
            self._comparison.compare(handle, tensor, replayer)
        finally:
            if self.verified is not None:
                self._count_unrepeatable(self.verified)

    def _count_unrepeatable(self, verified: Verified) -> None:
        if self._statistics is not None:
            self._statistics.unrepeatable = len(verified.unrepeatable)

    def check_version(self, saved: SavedVersion) -> None:
        """Check a saved tensor's version counter, as autograd does without hooks.

        Raises:
            ChangedSinceForwardError: If the tensor was overwritten and `strict` is set.
        """
        if not saved.has_moved():
            return
        if self._is_strict:
            raise overwritten_error("a saved tensor")
        if self.verified is not None and not self.verified.has_warned:
            self.verified.has_warned = True
            warnings.warn(
                f"{MODIFIED}: a tensor that autograd saved in a replay region. Plain "
                "autograd would raise; replay computes the gradient from the values "
                "that were saved. strict=True raises, too.",
                OverwrittenWarning,
                stacklevel=2,
            )


def _saved_version(tensor: Tensor) -> SavedVersion | None:
    if not has_bits(tensor) or tensor.is_inference():
        return None
    try:
        return SavedVersion(tensor)
    except RuntimeError:  # A conjugated tensor, for example.
        return None


def settle_source(
    source: TapeValue, hooks: Hooks | None, take: Callable[[Tensor], Any] | None
) -> None:
    """Record the version and address of a replay's input, or pack the input.

    An input that is offloaded has been packed.

    A replay input that is a running statistic is copied. Hooks, those around the region
    or those that offload its inputs, pack it unless it is a parameter or an inference
    tensor. The function `take`, if given, fingerprints the input's content, because
    some writes do not bump the version counter.
    """
    tensor = source.tensor
    if isinstance(source.packed, Offloaded):
        source.packed.settle()
    if tensor is None:
        return
    if source.is_state:
        # The next call of the function overwrites it, before this call's backward.
        tensor = source.tensor = copy_of(tensor)
        source.address = None
    if hooks is None or isinstance(tensor, Parameter) or tensor.is_inference():
        source.version = version_of(tensor)
        if source.address is None:
            source.address = address_of(tensor)
        if take is not None and not source.is_state:
            with without_dispatch_modes():
                source.content = take, take(tensor)
    else:
        if source.address == address_of(tensor):
            source.address = None  # The hooks may return a copy.
        source.packed = Packed(tensor, hooks)
        source.tensor = None
