"""Plain step against step under regions, bit for bit.

A checkpointed step should be the plain one: same loss, same gradients, same buffers,
same random numbers. When it is not, nothing says so: training goes on and is a little
wrong. `audit` runs one step both ways from the same state, compares every byte, names
what differs, and puts everything back.

`walk` finds what a step can change, `state` holds it and puts it back, `compare` holds
what a run left behind and tells in what two runs differ; `held` does so for a tensor,
`streams` for random numbers. `step` is one training step, `regions` says which regions
are meant, `run` holds the three runs, `forms` the call itself, and `report` what it
returns.

Nothing here shares code with the engine's own bookkeeping of random streams and
buffers: an audit that did could not find it wrong.
"""

from membudget.audit.differences import Difference
from membudget.audit.forms import audit
from membudget.audit.verdict import AuditReport, Compared
from membudget.selection import default_names

__all__ = ["AuditReport", "Compared", "Difference", "audit", "default_names"]
