"""Compare a plain step with the same step under regions, bit for bit.

A checkpointed step should give the plain step's loss, gradients, buffers and random
numbers. When it does not, nothing fails: training just goes slightly wrong. `audit`
runs one step both ways from the same state, compares every byte, names what differs,
and restores everything.

`forms` has the call itself, `runs` the three runs and the regions on them,
`differences` the comparison of two outcomes, and `verdict` the report.

An audit uses none of the engine's bookkeeping of random streams and buffers; otherwise
it could not find errors in it.
"""

from membudget.audit.differences import Difference
from membudget.audit.forms import audit
from membudget.audit.verdict import AuditReport, Compared
from membudget.selection import default_names

__all__ = ["AuditReport", "Compared", "Difference", "audit", "default_names"]
