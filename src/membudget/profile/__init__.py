"""One training step, recorded: what it keeps, what it costs, and its peak.

`recorder` watches a step, `assemble` makes numbers of what it saw, `fake` runs a step
without memory, `workspace` and `cost` say what one operator needs, `run` puts all of it
together, `report` and `sweep` are for people.
"""

from membudget.profile.devices import DEVICES, Device
from membudget.profile.profiling import profile
from membudget.profile.result import Profile
from membudget.profile.sweep import Sweep, sweep

__all__ = ["DEVICES", "Device", "Profile", "Sweep", "profile", "sweep"]
