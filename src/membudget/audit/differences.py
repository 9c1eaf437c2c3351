"""What a run left behind, and in what two runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from membudget.state.copies import HeldTensor, first_difference, hold, is_same
from membudget.state.rng import frozen, global_streams
from membudget.state.snapshot import State
from membudget.state.walk import walk

Kind = Literal[
    "loss",
    "output",
    "gradient",
    "parameter",
    "buffer",
    "attribute",
    "stream",
    "value",
]


@dataclass(frozen=True)
class Difference:
    """One thing that two runs of a step left differently.

    Attributes:
        kind: What it is. An "attribute" is a tensor that a module, or the batch, holds
            without registering it; a "stream" is a source of random numbers; a "value"
            is a Python number, string or length.
        name: Its name: a parameter's or buffer's as in the model, otherwise the
            expression that leads to it.
        detail: How it differs, in words.
        elements: How many elements of a tensor differ; `None` if it is no tensor, or
            one of another shape.
        total: How many elements the tensor has.
        index: The first element that differs.
        plain: The value there after the plain run, as text.
        other: The value there after the run that was compared with it: the budgeted
            one, or the second plain one.
    """

    kind: Kind
    name: str
    detail: str
    elements: int | None = None
    total: int | None = None
    index: tuple[int, ...] | None = None
    plain: str = ""
    other: str = ""

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.kind} {self.name}: {self.detail}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as data for JSON."""
        return asdict(self)


class Results:
    """What a run returned, held as it was when the run returned it.

    Attributes:
        tensors: The content of each tensor by kind and name.
        values: The Python values, by name.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.tensors: dict[tuple[Kind, str], HeldTensor | None] = {}
        self.values: dict[str, Any] = {}

    @classmethod
    def of(cls, output: Any) -> Results:
        """Hold what a user's own step returned."""
        results = cls()
        results.hold("output", output)
        return results

    def hold(self, kind: Literal["loss", "output"], value: Any) -> None:
        """Hold the tensors and the Python values in `value`."""
        found = walk([(kind, value)], "output")
        for name, (_, tensor) in found.tensors.items():
            self.tensors[kind, name] = hold(tensor)
            self.values[f"{name}.requires_grad"] = tensor.requires_grad
        self.values |= found.values


class Outcome:
    """What one run left behind, held to be compared.

    Attributes:
        tensors: The content of each tensor by kind and name; `None` for the gradient
            of a leaf that got none.
        streams: The state of each random stream, by name.
        results: The Python values in what the step returned, by name.
        values: The Python values that the step's objects hold, by name.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        state: State,
        results: Results | None = None,
    ) -> None:
        """Hold what `roots` hold now.

        Args:
            roots: The objects that the run may have changed, by name.
            state: The state before the run. What the run did not change is shared with
                it, and only what it had has gradients: a region may leave a tensor of
                its own on a module, and that one's gradient is nobody's.
            results: What the run returned.
        """
        found = walk(roots.items())
        results = results or Results()
        self.tensors: dict[tuple[Kind, str], HeldTensor | None] = {**results.tensors}
        for name, (kind, tensor) in found.tensors.items():
            self.tensors[kind, name] = hold(tensor, state.content(name))
            if state.had_leaf(tensor):
                grad = tensor.grad
                self.tensors["gradient", name] = None if grad is None else hold(grad)
        streams = global_streams() | found.streams
        self.streams = {name: frozen(stream.read()) for name, stream in streams.items()}
        self.values = found.values
        self.results = results.values

    def of(self, kind: Kind) -> dict[str, HeldTensor | None]:
        """Return the tensors of one kind, by name."""
        return {name: held for (k, name), held in self.tensors.items() if k == kind}


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs.

    Attributes:
        differences: Those in loss, outputs, gradients, parameters, buffers, tensor
            attributes and random streams.
        side_effects: Those in Python values that the model or the batch holds.
    """

    differences: tuple[Difference, ...]
    side_effects: tuple[Difference, ...]


def compare(
    plain: Outcome,
    other: Outcome,
    start_streams: Mapping[str, Any],
    label: str,
) -> Comparison:
    """Compare what two runs left behind.

    Args:
        plain: What the plain run left.
        other: What the run that is compared with it left.
        start_streams: The state of each random stream before both.
        label: What to call the other run.
    """
    differences = [
        *_tensor_differences(plain, other, label),
        *_value_differences("output", plain.results, other.results, label),
        *_stream_differences(plain, other, start_streams, label),
    ]
    side_effects = [
        *_one_sided_attributes(plain, other, label),
        *_value_differences("value", plain.values, other.values, label),
    ]
    return Comparison(tuple(differences), tuple(side_effects))


_ABSENT = object()


def _tensor_differences(
    plain: Outcome, other: Outcome, label: str
) -> Iterator[Difference]:
    for kind, name in plain.tensors | other.tensors:
        left = plain.tensors.get((kind, name), _ABSENT)
        right = other.tensors.get((kind, name), _ABSENT)
        if isinstance(left, HeldTensor) and isinstance(right, HeldTensor):
            if not is_same(left, right):
                yield _tensor_difference(kind, name, left, right, label)
        elif left is not right and (kind != "attribute"):
            texts = _presence(left), _presence(right)
            detail = f"plain has {texts[0]}, {label} {texts[1]}"
            yield Difference(kind, name, detail, plain=texts[0], other=texts[1])


def _presence(value: object) -> str:
    if isinstance(value, HeldTensor):
        return value.about
    return "None" if value is None else "none of that name"


def _tensor_difference(
    kind: Kind, name: str, left: HeldTensor, right: HeldTensor, label: str
) -> Difference:
    place = first_difference(left, right) if left.about == right.about else None
    if place is None:
        detail = f"plain is {left.about}, {label} {right.about}"
        return Difference(kind, name, detail, plain=left.about, other=right.about)
    if place.total == 1:
        detail = f"plain {place.left}, {label} {place.right}"
    else:
        detail = (
            f"{place.count:,} of {place.total:,} elements, first at "
            f"{list(place.index)}: plain {place.left}, {label} {place.right}"
        )
    return Difference(
        kind,
        name,
        detail,
        elements=place.count,
        total=place.total,
        index=place.index,
        plain=place.left,
        other=place.right,
    )


def _one_sided_attributes(
    plain: Outcome, other: Outcome, label: str
) -> Iterator[Difference]:
    """Yield tensors that only one run left: a list of them that grew, mostly."""
    for kind, name in plain.tensors | other.tensors:
        if kind == "attribute" and (kind, name) not in other.tensors:
            yield Difference("value", name, f"only plain left this tensor, not {label}")
        if kind == "attribute" and (kind, name) not in plain.tensors:
            yield Difference("value", name, f"only {label} left this tensor, not plain")


def _value_differences(
    kind: Literal["output", "value"],
    plain: Mapping[str, Any],
    other: Mapping[str, Any],
    label: str,
) -> Iterator[Difference]:
    for name in [*plain, *(name for name in other if name not in plain)]:
        # By their text, so that a NaN equals a NaN, and `1` differs from `True`.
        left, right = (
            repr(values[name]) if name in values else "nothing"
            for values in (plain, other)
        )
        if left != right:
            left, right = _shortened(left), _shortened(right)
            detail = f"plain {left}, {label} {right}"
            yield Difference(kind, name, detail, plain=left, other=right)


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _stream_differences(
    plain: Outcome, other: Outcome, start: Mapping[str, Any], label: str
) -> Iterator[Difference]:
    for name in plain.streams | other.streams:
        left, right = plain.streams.get(name), other.streams.get(name)
        if left == right:
            continue
        if left == start.get(name):
            detail = f"{label} drew from it, plain did not"
        elif right == start.get(name):
            detail = f"plain drew from it, {label} did not"
        else:
            detail = f"both drew from it, and {label} left it elsewhere than plain"
        yield Difference("stream", name, detail)
