"""Policies that offload what other policies keep."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from membudget.engine.candidate import Answer, Candidate
from membudget.engine.policy import Policy, as_policy
from membudget.offload import Offload


@dataclass(frozen=True)
class _Elsewhere(Policy):
    """Offloads what another policy keeps."""

    policy: Policy
    by: Offload

    @property
    def key(self) -> Hashable:
        return self.policy.key  # Without the host memory, which no cache should own.

    def keeps(self, candidate: Candidate) -> Answer:
        return self.policy.keeps(candidate) and self.by

    def by_operator(self, operator: Any) -> Answer | None:
        answer = self.policy.by_operator(operator)
        return answer and self.by

    def keeps_name(self, name: str) -> Answer:
        return self.policy.keeps_name(name) and self.by


def may_offload(policy: Policy) -> bool:
    """Return whether a policy was made by `offloaded`, or of one that was."""
    return _Elsewhere in policy.kinds


def offloaded(policy: Any, by: Offload) -> Policy:
    """Offload the outputs that a policy keeps: hold them in host memory.

    Their copies run beside the device's work, and come back in the order in which
    earlier backward passes asked for them.

    Args:
        policy: A policy, or what the option `keep` of a region takes beside one.
        by: Holds them; made by `membudget.offload`. What it does not move, such as
            small outputs, stays on the device.

    Example:
        >>> import membudget as mb, torch
        >>> off = mb.offload("1MiB")
        >>> keep = mb.policies.offloaded(mb.policies.matmuls, off)
        >>> layer = torch.nn.Linear(128, 256)
        >>> y = mb.checkpoint(layer, torch.ones(128, 128), keep=keep)
        >>> off.status().out_bytes
        131072
    """
    return _Elsewhere(as_policy(policy), by)
