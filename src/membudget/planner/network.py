"""Minimum cuts of flow networks, by Dinic's algorithm (1970) with another first round.

Each round finds the distance of every node from the source in the residual network, and
pushes flow along shortest paths until each of them has a full edge:

    levels    0 source     1        2        3 sink
              ├── 5 ──▶ a ─┬─ 3 ──▶ b ── 4 ──▶        first path: 3, a ─▶ b is full
              │            └─ 1 ──▶ c ── 2 ──▶        next path: goes on at a

The networks of a step have hardly a cycle, and a flow in them may pass every operator.
Dinic takes a round for each length of a path. So the first round takes topological
numbers for levels, and pushes along paths of any length; left are those that take flow
back. A step that iterates one layer 25 times took 45 rounds for a cut, and takes one.

What the source reaches when no path leads to the sink is the source side of the minimum
cut that is nearest to the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

_EPSILON = 1e-15


class Network:
    """A flow network: a directed graph with edge capacities.

    Example:
        >>> network = Network(4)
        >>> edges = [(0, 2, 3.0), (2, 3, 1.0), (3, 1, 2.0)]
        >>> numbers = [network.connect(*edge) for edge in edges]
        >>> sorted(network.source_side(0, 1))
        [0, 2]
    """

    def __init__(self, nodes: int):
        """Create a network without edges, whose nodes are numbered from 0."""
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        self._heads: list[int] = []
        self._room: list[float] = []

    def connect(self, start: int, end: int, capacity: float) -> int:
        """Add an edge with a capacity; return its number."""
        # An edge and its reverse are numbered 2k and 2k + 1: `edge ^ 1` is the other.
        number = len(self._heads)
        self._edges[start].append(number)
        self._edges[end].append(number + 1)
        self._heads += (end, start)
        self._room += (capacity, 0.0)
        return number

    def with_capacities(self, capacities: Iterable[tuple[int, float]]) -> Network:
        """Return a network with the same edges, of which some have other capacities."""
        other = copy(self)
        other._room = self._room.copy()
        for edge, capacity in capacities:
            other._room[edge] = capacity
        return other

    def source_side(self, source: int, sink: int) -> set[int]:
        """Return the source side of the minimum cut that is nearest to the source."""
        levels = self._numbers(source)
        while True:  # One blocking flow for each level graph.
            self._block(source, sink, levels)
            levels = self._levels(source, sink)
            if levels[sink] < 0:
                return {node for node, level in enumerate(levels) if level >= 0}

    def _numbers(self, source: int) -> list[int]:
        """Return numbers of the nodes that rise along all edges, but where these cycle.

        They are -1 where no path leads. A node's number is less than those of all that
        the search has left before it, which are those that the node leads to.
        """
        edges, heads = self._edges, self._heads
        numbers = [-1] * len(edges)
        number = len(edges)
        was_seen = [False] * len(edges)
        was_seen[source] = True
        path = [(source, iter(edges[source]))]
        while path:
            node, ahead = path[-1]
            for edge in ahead:
                head = heads[edge]
                if not (edge & 1 or was_seen[head]):
                    was_seen[head] = True
                    path.append((head, iter(edges[head])))
                    break
            else:
                path.pop()
                number -= 1
                numbers[node] = number
        return numbers

    def _levels(self, source: int, sink: int) -> list[int]:
        """Return each node's distance from the source in the residual network.

        It is -1 where no path leads, and for nodes that are no nearer than the sink.
        """
        edges, heads, room = self._edges, self._heads, self._room
        levels = [-1] * len(edges)
        levels[source] = level = 0
        reached = [source]
        while reached and levels[sink] < 0:
            level += 1
            nearer, reached = reached, []
            for node in nearer:
                for edge in edges[node]:
                    head = heads[edge]
                    if levels[head] < 0 and room[edge] > _EPSILON:
                        levels[head] = level
                        reached.append(head)
        return levels

    def _block(self, source: int, sink: int, levels: list[int]) -> None:
        """Push flow along paths of rising levels until each of them has a full edge."""
        heads, room = self._heads, self._room
        tried = [0] * len(levels)  # Of each node's edges, the first ones lead nowhere.
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                self._push(path)
                # The next path goes on from before the first edge that is now full.
                full = 0
                while room[path[full]] > _EPSILON:
                    full += 1
                node = heads[path[full] ^ 1]
                del path[full:]
            edges, level = self._edges[node], levels[node]
            for place in range(tried[node], len(edges)):
                edge = edges[place]
                if room[edge] > _EPSILON and levels[heads[edge]] > level:
                    tried[node] = place
                    path.append(edge)
                    node = heads[edge]
                    break
            else:
                if not path:
                    return
                node = heads[path.pop() ^ 1]
                tried[node] += 1

    def _push(self, path: list[int]) -> None:
        """Push as much flow along a path as it has room for."""
        room = self._room
        flow = min(map(room.__getitem__, path))
        for edge in path:
            room[edge] -= flow
            room[edge ^ 1] += flow
