"""The operators on the way to what autograd saved in a region, if nothing is there.

One scan from the region's last operator to its first: what writes a storage that is
wanted runs again, and then what it reads is wanted, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from membudget.graph import StepGraph
from membudget.planner.regions import Region, saved_in, storages_of


@dataclass
class Ways:
    """What has to run, and for how long it matters.

    Attributes:
        freed: What autograd saved in the region and is made again, each with the first
            moment at which nothing of it is saved there.
        until: The first moment at which nothing that is wanted comes of each storage.
        writers: The operators that make each storage, in order.
        writes: What each of them writes, those storages and others.
        reads: What each of them needs besides.
    """

    freed: dict[int, int]
    until: dict[int, int]
    writers: dict[int, list[int]] = field(default_factory=dict)
    writes: dict[int, list[int]] = field(default_factory=dict)
    reads: dict[int, list[int]] = field(default_factory=dict)


def ways_back(graph: StepGraph, region: Region, candidates: Collection[int]) -> Ways:
    """Find the operators on the way.

    Args:
        graph: The step.
        region: The region.
        candidates: The storages that may be made again; others are there.
    """
    freed: dict[int, int] = {}
    for saved in (graph.saved[index] for index in saved_in(graph, region)):
        storage = graph.values[saved.value].storage
        if storage in candidates:
            freed[storage] = max(freed.get(storage, 0), saved.freed)
    ways = Ways(freed, dict(freed))
    until = ways.until
    for index in range(region.end - 1, region.start - 1, -1):
        operator = graph.operators[index]
        if operator.is_view:
            continue
        writes = storages_of(graph, operator.outputs)
        outputs = [s for s in writes if s in candidates and s in until]
        if not outputs:
            continue
        for storage in outputs:
            ways.writers.setdefault(storage, []).insert(0, index)
        reads = storages_of(graph, operator.inputs)
        ways.writes[index] = writes
        ways.reads[index] = [s for s in reads if s not in writes]
        moment = max(until[storage] for storage in outputs)
        for storage in reads:
            if storage not in outputs:
                until[storage] = max(until.get(storage, 0), moment)
    return ways
