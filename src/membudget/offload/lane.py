"""Move the saved storages of one device out and back.

    forward   save ──> copy out ──> let go of the source when that has ended
    backward  ask ──> wait for the copy in ──> copy in what is asked for next

Rules:
    1. What is saved is a storage. All views of one share a copy, unless it may have
       been written to in between. It is copied when the operator has run that saves it
       for the last time, as the step before tells: `rrelu` writes to what it saved, and
       no version tells of writes through `.data`. If it is saved again after that, it
       is compared with its copy.
    2. A storage that lives anyway is not copied back, and in later steps not out.
    3. Bytes of storages that are on their way out, were loaded, or are kept because
       they are asked for first, are at most `window_bytes`. What is asked for and not
       there is loaded beyond that.
    4. A source is let go when its copy has ended: the host sees that, or the stream
       that saved it waits for it, because the window is full, or nobody needs it.
    5. A loaded copy is allocated for the stream that computes, and written after all
       that this stream was given before; it is read, and freed, after it has arrived.
    6. A block of the host is given back when no view needs it and its copy has ended,
       and is written again after all copies from and to the host have ended.
    7. Autograd may drop a view in any thread, at any time, and ask for one twice or
       never. What follows is done at once, or, where the lane is in use, when the next
       view is made, asked for or dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from threading import Lock

import torch
from torch import Tensor, UntypedStorage

from membudget._torch import (
    at_end_of_backward,
    current_graph_task_id,
    node_sequence_number,
)
from membudget.offload.disk import Disk
from membudget.offload.limits import Limits
from membudget.offload.link import Link, bytes_of
from membudget.offload.saved_again import KnownStorages, that_has
from membudget.offload.saved_storage import SavedStorage, View
from membudget.offload.slab import Slab
from membudget.offload.spill import Spill
from membudget.offload.steps import Steps, is_backward
from membudget.offload.unsent import Unsent
from membudget.offload.window import Window


class Lane:
    """The saved storages of one device.

    Attributes:
        moved_bytes: Bytes of storages, by what became of them: `"out"`, `"first"` (kept
            because they are asked for first), `"living"`, `"full"` (kept because the
            host's memory is full), `"spilled"` (from the host to the disk), `"ahead"`
            (loaded before they were asked for) and `"late"` (loaded when they were).
        window: Bytes of the device that moving takes.
    """

    def __init__(
        self, device: torch.device, places: tuple[Slab, Disk | None], limits: Limits
    ):
        """Use a slab, and a file, that other devices may use, too."""
        self.moved_bytes: Counter[str] = Counter()
        self._spill = Spill(*places, self.moved_bytes)
        self.window = Window(limits.window_bytes)
        self._link = Link(device, places[0].links)
        self._steps = Steps(limits.first_bytes)
        self._entries = KnownStorages()
        self._dropped: deque[tuple[SavedStorage, bool]] = deque()
        self._live = 0
        self._task = -1  # The backward pass that has asked last.
        self._unsent = Unsent()
        self._lock = Lock()

    def save(self, tensor: Tensor) -> View:
        """Return what autograd holds in place of a tensor.

        The operator that saves it may have yet to write to it.
        """
        node = node_sequence_number()
        with self._lock:
            if self._unsent.begins(node):
                self._tidy(awaited=True)
            return self._viewed(tensor)[0]

    def hold(self, tensor: Tensor) -> View:
        """Return what stands for a tensor that is complete, and begin to copy it.

        Writes are no errors until `View.check_from_now`: an operator in place tells its
        version after those who see it below autograd.
        """
        with self._lock:
            self._follow_up()
            view, entries = self._viewed(tensor)
            view.is_checked = False
            for entry, storage in self._unsent.take(entries):
                self._settle(entry, storage)
            return view

    def _viewed(self, tensor: Tensor) -> tuple[View, list[SavedStorage]]:
        """Return a view of a tensor's storage, and all that stand for that."""
        entries, storage = self._entries.of(tensor), tensor.untyped_storage()
        for known in entries:
            self._steps.save_again(known)
            self._unsent.add(known, storage if known.was_copied else None)
        entry = that_has(entries, tensor)
        if entry is None:
            entries.append(entry := self._new_entry(tensor))
        return View(tensor, entry, self._drop), entries

    def ask(self, view: View) -> Tensor:
        """Return the tensor of a view, for the stream that is current.

        Raises:
            ChangedSinceForwardError: If it was written to after autograd saved it.
        """
        with self._lock:
            self._tidy()
            entry = view.entry
            self._steps.ask(entry)
            self._clean_at_end()
            entry.unasked -= not view.was_asked
            view.was_asked = True
            tensor = view.restored(self._storage_of(entry))
            entry.hand_over()
            self._load_ahead()
            return tensor

    def before_write(self, view: View) -> None:
        """Let work that is launched now write to a storage; the view stays as it is."""
        with self._lock:
            entry = view.entry
            if entry.source is not None and (entry.stays or not entry.was_copied):
                entry.source = bytes_of(entry.source).clone().untyped_storage()
                entry.saved_on = self._link.now()
            else:
                self._link.wait(entry.copied)
                entry.source = None
            entry.forget_original()
            view.is_checked = False

    def tidy(self) -> None:
        """Begin copies out; follow up on those that ended, and on dropped views.

        No operator that saves tensors may be running in this thread.
        """
        with self._lock:
            self._tidy()

    def _tidy(self, awaited: bool = False) -> None:
        self._follow_up()
        for entry, storage in self._unsent.taken(awaited):
            self._settle(entry, storage)
        self._release()

    def _clean_at_end(self) -> None:
        """Let no dropped view hold memory after the backward pass that runs."""
        task = current_graph_task_id()
        if is_backward() and task != self._task:
            self._task = task
            at_end_of_backward(self._clean)

    def _clean(self) -> None:
        with self._lock:
            self._follow_up()
            self._release()

    def _drop(self, dropped: tuple[SavedStorage, bool]) -> None:
        """Note a view that autograd dropped; follow up on it at once, if possible.

        It is not where another thread uses the lane, or this one, which collects
        garbage while it does.
        """
        self._dropped.append(dropped)
        if self._lock.acquire(blocking=False):
            try:
                self._follow_up()
            finally:
                self._lock.release()

    def _follow_up(self) -> None:
        while self._dropped:
            entry, was_asked = self._dropped.popleft()
            entry.views -= 1
            entry.unasked -= not was_asked
            if not entry.views:
                self._finish(entry)

    # Out.

    def _settle(self, entry: SavedStorage, storage: UntypedStorage | None) -> None:
        """Copy what was saved, or compare what is saved again with its copy.

        Torchdiffeq's solvers fill a storage through `.data`, and save it in between.
        The plain step reads what is there at last.
        """
        if entry.leaves and entry.source is not None:
            self._send(entry, entry.source)
        elif storage is not None and entry.was_copied:
            now, copied = bytes_of(storage).cpu(), self._spill.content(entry)
            if not torch.equal(now, copied):
                entry.source, entry.stays = storage, True

    def _new_entry(self, tensor: Tensor) -> SavedStorage:
        entry = SavedStorage(tensor, tensor.untyped_storage())
        entry.saved_on = self._link.now()
        self._entries.add(entry)
        fate = self._steps.enter(entry, is_alone=not self._live)
        self._live += 1
        if fate == "unknown":
            entry.leaves = True
            self._unsent.add(entry)
        else:
            self._note(fate, entry)
        if fate == "first":
            self.window.count(entry)
        return entry

    def _send(self, entry: SavedStorage, source: UntypedStorage) -> None:
        entry.leaves = False
        entry.block = self._spill.room(entry.size, self._steps.saved())
        if entry.block is None:
            self._note("full", entry)
            return
        self._note("out", entry)
        content, made_on = entry.block.content, entry.saved_on
        entry.copied = self._link.copy_out(bytes_of(source), content, made_on)
        self.window.send(entry)
        self._release()

    def _release(self) -> None:
        """Let go of what has been copied; wait for that where it is over the window."""
        for entry in self.window.left():
            if not entry.stays:
                entry.source = None

    # Back.

    def _storage_of(self, entry: SavedStorage) -> UntypedStorage:
        """Return the bytes of an entry on the device, for the current stream."""
        if entry.source is not None:
            self._link.lend(entry.source, entry.saved_on)
            return entry.source
        original = entry.original()
        if original is not None:
            return original
        copy = entry.copy()
        if copy is None:
            copy = self._load(entry)
            self._note("late", entry)
        self._link.wait(entry.arrived)
        self._link.lend(copy, entry.loaded_on)
        return copy

    def _load_ahead(self) -> None:
        for entry in self._steps.coming() if is_backward() else ():
            if entry.is_on_device():
                continue
            if not self.window.has_room(entry):
                break
            try:
                self._load(entry)
            except torch.OutOfMemoryError:
                break  # It may fit when it is asked for.
            self._note("ahead", entry)

    def _load(self, entry: SavedStorage) -> UntypedStorage:
        entry.arrived = None
        if entry.block is None:
            read = partial(self._spill.read, entry)
            made = self._link.read_in(entry.size, read)
        else:
            block, copied = entry.block.content, entry.copied
            made, entry.arrived = self._link.copy_in(block, copied)
        entry.loaded, entry.loaded_on = made, self._link.now()
        self.window.count(entry)
        return made

    # The end.

    def _finish(self, entry: SavedStorage) -> None:
        self._live -= 1
        self._entries.forget(entry)
        self._unsent.forget(entry)
        if entry.loaded is not None:  # Nobody asked for it.
            if entry.arrived is not None:
                entry.loaded_on.wait_event(entry.arrived)
            entry.loaded = None
        self.window.drop(entry)
        entry.source = None
        self._spill.forget(entry)

    def _note(self, what: str, entry: SavedStorage) -> None:
        self.moved_bytes[what] += entry.size
