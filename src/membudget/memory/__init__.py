"""Measure memory: bytes by storage, the peak of a call, and what autograd saves."""

from membudget.memory.peak import Peak, peak
from membudget.memory.saved import SavedReport, SavedTensor, saved
from membudget.memory.storage import storage_bytes

__all__ = [
    "Peak",
    "SavedReport",
    "SavedTensor",
    "peak",
    "saved",
    "storage_bytes",
]
