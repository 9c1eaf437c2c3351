"""Record the outcome of an audit run, and compare two outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from membudget.state.identity import TensorCopy, first_difference, host_copy, is_same
from membudget.state.rng import frozen, global_streams
from membudget.state.snapshot import State
from membudget.state.walk import walk

DifferenceKind = Literal[
    "loss",
    "output",
    "gradient",
    "parameter",
    "buffer",
    "attribute",
    "stream",
    "value",
]


TensorCopies = dict[tuple[DifferenceKind, str], TensorCopy | None]


@dataclass(frozen=True)
class Difference:
    """One result or piece of state that differs between two runs of a step.

    Attributes:
        kind: What kind of result or state differs. An "attribute" is an unregistered
            tensor of a module or of the batch; a "stream" is a random number generator;
            a "value" is a Python number, string or container length.
        name: Name of the parameter or buffer in the model; for other objects, the
            Python expression that reaches the object.
        detail: Description of the difference in words.
        elements: Number of tensor elements that differ; `None` if the object is not a
            tensor, or the shapes differ.
        total: Total number of elements of the tensor.
        index: Index of the first element that differs.
        plain: Value after the plain run, as text.
        other: Value after the budgeted run or the second plain run, as text.
    """

    kind: DifferenceKind
    name: str
    detail: str
    elements: int | None = None
    total: int | None = None
    index: tuple[int, ...] | None = None
    plain: str = ""
    other: str = ""

    def __str__(self) -> str:
        """Return the difference as one line."""
        return f"{self.kind} {self.name}: {self.detail}"

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as a JSON-serializable dict."""
        return asdict(self)


class Results:
    """Copies of the values that a step returned.

    Attributes:
        tensors: Copies of the returned tensors, keyed by kind and name.
        values: The returned Python values, keyed by name.
        copy: Copies a tensor, or returns a given equal copy: `host_copy` or `digest`.
    """

    def __init__(self, copy: Callable[..., TensorCopy] = host_copy) -> None:
        """Create an empty collection of step results."""
        self.copy = copy
        self.tensors: TensorCopies = {}
        self.values: dict[str, Any] = {}

    @classmethod
    def of(cls, output: Any) -> Results:
        """Copy the values that a user-defined step returned."""
        results = cls()
        results.add("output", output)
        return results

    def add(self, kind: Literal["loss", "output"], value: Any) -> None:
        """Copy the tensors and the Python values in `value`."""
        found = walk([(kind, value)], "output")
        for name, (_, tensor) in found.tensors.items():
            self.tensors[kind, name] = self.copy(tensor)
            self.values[f"{name}.requires_grad"] = tensor.requires_grad
        self.values |= found.values


class Outcome:
    """The results of one audit run, and the state after the run.

    Attributes:
        tensors: Copies of all tensors, keyed by kind and name; `None` for the gradient
            of a leaf that received no gradient.
        streams: State of each random number generator, keyed by name.
        streams_before: The same before the run.
        results: Python values that the step returned, keyed by name.
        values: Python values in the objects that the step may change, keyed by name.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        state: State,
        results: Results | None = None,
    ) -> None:
        """Copy the current state of the objects in `roots`.

        Args:
            roots: Objects that the run may have changed, keyed by name.
            state: State before the run. Tensors that the run did not change share the
                copies in `state`. Gradients are copied only for leaves that `state`
                captured, not for tensors that a region attached to a module.
            results: Values that the run returned; its `copy` copies the state, too.
        """
        found = walk(roots.items())
        results = results or Results()
        copy = results.copy
        self.tensors: dict[tuple[DifferenceKind, str], TensorCopy | None] = {
            **results.tensors
        }
        for name, (kind, tensor) in found.tensors.items():
            self.tensors[kind, name] = copy(tensor, state.content(name))
            if state.had_leaf(tensor):
                grad = tensor.grad
                self.tensors["gradient", name] = None if grad is None else copy(grad)
        streams = global_streams() | found.streams
        self.streams = {name: frozen(stream.read()) for name, stream in streams.items()}
        self.streams_before = state.stream_states()
        self.values = found.values
        self.results = results.values

    def of(self, kind: DifferenceKind) -> dict[str, TensorCopy | None]:
        """Return all tensors of one kind, such as gradients, keyed by name."""
        return {name: copy for (k, name), copy in self.tensors.items() if k == kind}


@dataclass(frozen=True)
class RunDifferences:
    """The differences between two runs of an audit.

    Attributes:
        differences: Differences in loss, outputs, gradients, parameters, buffers,
            tensor attributes and random number generators.
        side_effects: Differences in Python values that the model or the batch holds.
    """

    differences: tuple[Difference, ...]
    side_effects: tuple[Difference, ...]


def compare(plain: Outcome, other: Outcome, label: str) -> RunDifferences:
    """Compare the outcomes of two runs from one state."""
    differences = [
        *_tensor_differences(plain, other, label),
        *_value_differences("output", plain.results, other.results, label),
        *_stream_differences(plain, other, label),
    ]
    side_effects = [
        *_one_sided_attributes(plain, other, label),
        *_value_differences("value", plain.values, other.values, label),
    ]
    return RunDifferences(tuple(differences), tuple(side_effects))


_ABSENT = object()


def _tensor_differences(
    plain: Outcome, other: Outcome, label: str
) -> Iterator[Difference]:
    for kind, name in plain.tensors | other.tensors:
        left = plain.tensors.get((kind, name), _ABSENT)
        right = other.tensors.get((kind, name), _ABSENT)
        if isinstance(left, TensorCopy) and isinstance(right, TensorCopy):
            if not is_same(left, right):
                yield _tensor_difference(kind, name, left, right, label)
        # An attribute of one run only is a side effect: see `_one_sided_attributes`.
        elif left is not right and kind != "attribute":
            texts = _presence(left), _presence(right)
            detail = f"plain has {texts[0]}, {label} {texts[1]}"
            yield Difference(kind, name, detail, plain=texts[0], other=texts[1])


def _presence(value: object) -> str:
    if isinstance(value, TensorCopy):
        return value.about
    return "None" if value is None else "none of that name"


def _tensor_difference(
    kind: DifferenceKind, name: str, left: TensorCopy, right: TensorCopy, label: str
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
    """Yield tensors that only one run left, such as elements of a list that grew."""
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
        # Compared as text, so that a NaN equals a NaN, and `1` differs from `True`.
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
    plain: Outcome, other: Outcome, label: str
) -> Iterator[Difference]:
    start = plain.streams_before
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
