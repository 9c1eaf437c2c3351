"""Random programs, each from its seed."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fuzz.frames import BACKWARDS, BETWEEN, BINDINGS, BLOCKS, Between
from tests.fuzz.program import Block, Line, Node, Passing, Program, Region
from tests.fuzz.statements import KINDS, Kind

_PASSINGS: tuple[Passing, ...] = (
    *("position", "position", "keyword", "closure", "list"),
)
_DEEPEST = 3  # Regions in regions.


@dataclass
class _Drawing:
    """The drawing of one program.

    Attributes:
        rng: What is drawn from.
        left: How many statements may still be drawn.
        kinds: What statements are drawn from.
        names: How many names there are, besides `x` and `y`.
        regions: How many regions there are.
    """

    rng: random.Random
    left: int
    kinds: Sequence[Kind]
    names: int = 0
    regions: int = 0
    visible: list[str] = field(default_factory=lambda: ["x", "y"])

    def body(self, depth: int, longest: int) -> tuple[Node, ...]:
        """Draw some statements inside `depth` regions."""
        nodes: list[Node] = []
        while self.left > 0 and len(nodes) < longest:
            nodes.append(self._node(depth))
        return tuple(nodes)

    def _node(self, depth: int) -> Node:
        chance = self.rng.random()
        if depth < _DEEPEST and chance < (0.25 if self.regions else 0.6):
            self.regions += 1
            name = f"r{self.regions}"
            body = self.body(depth + 1, self.rng.randint(1, 6))
            return Region(name, body, self.rng.choice(_PASSINGS))
        if chance > 0.93:
            header = self.rng.choice(BLOCKS)
            operands = (self._read(),) if "{a}" in header else ()
            return Block(header, self.body(depth, self.rng.randint(1, 4)), operands)
        return self._line()

    def _line(self) -> Line:
        self.left -= 1
        weights = [kind.weight for kind in self.kinds]
        (kind,) = self.rng.choices(self.kinds, weights)
        operands = [self._read() for _ in range(kind.operands)]
        if "writes" in kind.traits and len(self.visible) > 2:
            # A leaf that requires a gradient cannot be written into.
            operands[0] = self.rng.choice(self.visible[2:])
        target = ""
        if kind.assigns:
            self.names += 1
            target = f"v{self.names}"
            self.visible.append(target)
        return Line(kind, tuple(operands), target)

    def _read(self) -> str:
        """Draw a name, the newest ones oftener, so that programs are deep."""
        recent = self.visible[-3:] if self.rng.random() < 0.6 else self.visible
        return self.rng.choice(recent)


def draw(seed: int, kinds: Sequence[Kind] = KINDS) -> Program:
    """Draw the program of a seed."""
    rng = random.Random(seed)
    steps = 4 if rng.random() < 0.2 else 2
    between = _between(rng)
    if between.reading:
        # It is read often, and a call that is not verified comes before it.
        kinds = [*kinds, Kind(between.reading, weight=40)]
        steps = 4 if rng.random() < 0.6 else steps
    text = between.text
    if text and steps > 2 and rng.random() < 0.6:
        text = "if n.pauses == 3:\n" + textwrap.indent(text, "    ")
    drawing = _Drawing(rng, left=rng.randint(2, 11), kinds=kinds)
    body: tuple[Node, ...] = ()
    while not drawing.regions or not drawing.names or drawing.left > 0:
        drawing.left = max(drawing.left, 1)
        body += drawing.body(0, 1)
    names = [f"v{i + 1}" for i in range(drawing.names)]
    outputs = {names[-1], *rng.sample(names, min(len(names), rng.randint(0, 2)))}
    return Program(
        body=body,
        outputs=tuple(sorted(outputs)),
        between=text,
        between_reason=between.reason,
        backward=rng.choice((BACKWARDS[0], *BACKWARDS)),
        seed=seed,
        trains=rng.random() < 0.5,
        steps=steps,
    )


def _between(rng: random.Random) -> Between:
    chance = rng.random()
    if chance < 0.3:
        return rng.choice(BETWEEN if chance < 0.15 else BINDINGS)
    return Between("")
