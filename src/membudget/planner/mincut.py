"""A minimum cut by Dinic's algorithm (1970), for networks of some hundred nodes."""

from __future__ import annotations

from collections import deque

_EPSILON = 1e-15


class Network:
    """A directed graph with capacities.

    Example:
        >>> network = Network(4)
        >>> for start, end, capacity in [(0, 2, 3.0), (2, 3, 1.0), (3, 1, 2.0)]:
        ...     network.connect(start, end, capacity)
        >>> sorted(network.source_side(0, 1))
        [0, 2]
    """

    def __init__(self, nodes: int):
        """Begin without edges.

        Args:
            nodes: How many nodes there are; they are numbered from 0.
        """
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        self._heads: list[int] = []
        self._room: list[float] = []

    def connect(self, start: int, end: int, capacity: float) -> None:
        """Add an edge."""
        for tail, head, room in ((start, end, capacity), (end, start, 0.0)):
            self._edges[tail].append(len(self._heads))
            self._heads.append(head)
            self._room.append(room)

    def source_side(self, source: int, sink: int) -> set[int]:
        """Return the nodes on the source's side of the minimum cut nearest to it."""
        while True:
            levels = self._levels(source)
            if sink not in levels:
                return set(levels)
            nexts = [0] * len(self._edges)
            while self._push(source, sink, levels, nexts):
                pass

    def _levels(self, source: int) -> dict[int, int]:
        """Return how far each node is from the source, where there is room."""
        levels = {source: 0}
        pending = deque([source])
        while pending:
            node = pending.popleft()
            for edge in self._edges[node]:
                head = self._heads[edge]
                if self._room[edge] > _EPSILON and head not in levels:
                    levels[head] = levels[node] + 1
                    pending.append(head)
        return levels

    def _push(
        self, source: int, sink: int, levels: dict[int, int], nexts: list[int]
    ) -> bool:
        """Push flow along one shortest path; tell whether there was one."""
        path: list[int] = []
        node = source
        while node != sink:
            edge = self._next_edge(node, levels, nexts)
            if edge is not None:
                path.append(edge)
                node = self._heads[edge]
            elif path:
                node = self._heads[path.pop() ^ 1]
                nexts[node] += 1
            else:
                return False
        flow = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= flow
            self._room[edge ^ 1] += flow
        return True

    def _next_edge(
        self, node: int, levels: dict[int, int], nexts: list[int]
    ) -> int | None:
        """Return the next edge that leads one level further and has room."""
        edges = self._edges[node]
        while nexts[node] < len(edges):
            edge = edges[nexts[node]]
            further = levels.get(self._heads[edge]) == levels[node] + 1
            if further and self._room[edge] > _EPSILON:
                return edge
            nexts[node] += 1
        return None
