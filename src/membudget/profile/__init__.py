"""One training step, recorded: what it saves, what each operator costs, its peak.

`profiling` has the call itself. `step_recorder` and `lifetimes` watch the step, and
`assemble` builds its graph; `fake` runs a step without memory; `workspace`, `cost`,
`devices` and `optimizer` find what operators and optimizers need; `live_ranges` reads
the graph; `sweep` and `polynomial` extrapolate to other sizes.
"""

from membudget.profile.devices import DEVICES, Device
from membudget.profile.profiling import profile
from membudget.profile.result import Profile
from membudget.profile.sweep import Sweep, sweep

__all__ = ["DEVICES", "Device", "Profile", "Sweep", "profile", "sweep"]
