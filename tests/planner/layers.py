"""Training steps written down layer by layer.

Each layer is one operator of the forward and one of the backward, in float32:

* bytes are those of the outputs; what a step allocates are activations, gradients of
  activations (alive from the first operator that makes a part of one to its last
  reader) and gradients of parameters, which stay to the end;
* seconds are those of the slower of arithmetic and memory, at two fixed rates; the
  backward of a layer takes twice the arithmetic of its forward, and moves twice the
  bytes;
* each operator saves what its gradient is computed from: a convolution and a matrix
  product their input, a rectifier its output, a normalization its input, a pooling its
  input and the places of its maxima, the loss the logarithms of its probabilities.

A normalization and the rectifier after it are one operator, as in fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod

from membudget.graph import ModuleCall, Saved, StaticBytes, StepGraph, Storage, Value
from tests.planner.drafts import operator

FLOPS_PER_S = 10e12
BYTES_PER_S = 500e9
FLOAT_BYTES = 4
INDEX_BYTES = 8


@dataclass(frozen=True)
class Act:
    """The output of a layer: a value, and the shape of one sample."""

    value: int
    channels: int
    height: int
    width: int

    @property
    def elements(self) -> int:
        """Of one sample."""
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class _Layer:
    """What the backward of a layer needs to know."""

    inputs: tuple[Act, ...]
    output: Act
    parameters: int
    flops: int
    moved_bytes: int
    is_sum: bool


@dataclass
class Net:
    """A network in the making, layer by layer; `finish` adds the backward.

    Attributes:
        batch: Samples.
    """

    batch: int
    operators: list = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    layers: list[_Layer] = field(default_factory=list)
    calls: list[list] = field(default_factory=list)
    path: str = ""
    parameters: int = 0

    # Layers.

    def image(self, height: int, width: int) -> Act:
        """Return a batch of pictures, which were there before the step."""
        size = self.batch * 3 * height * width * FLOAT_BYTES
        return Act(self._value(size, -1, 0), 3, height, width)

    def conv(
        self, x: Act, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1
    ) -> Act:
        """Convolve, padded so that a stride of 1 keeps the size."""
        height, width = -(-x.height // stride), -(-x.width // stride)
        weights = kernel * kernel * (x.channels // groups) * channels
        flops = 2 * weights * height * width * self.batch
        shape = (channels, height, width)
        out = self._layer("conv", [x], shape, flops=flops, parameters=weights)
        self._save(x.value)
        return out

    def linear(self, x: Act, features: int) -> Act:
        """Multiply by a matrix."""
        weights = x.elements * features
        flops = 2 * weights * self.batch
        count = weights + features
        shape = (features, 1, 1)
        out = self._layer("linear", [x], shape, flops=flops, parameters=count)
        self._save(x.value)
        return out

    def relu(self, x: Act) -> Act:
        """Rectify."""
        out = self._layer("relu", [x], (x.channels, x.height, x.width))
        self._save(out.value)
        return out

    def norm(self, x: Act) -> Act:
        """Normalize over the batch; rectify, where a rectifier follows."""
        shape = (x.channels, x.height, x.width)
        out = self._layer("norm", [x], shape, parameters=2 * x.channels)
        self._save(x.value)
        return out

    def pool(self, x: Act, size: int = 2) -> Act:
        """Take the maximum of each window, and note its place."""
        shape = (x.channels, -(-x.height // size), -(-x.width // size))
        out = self._layer("pool", [x], shape, has_indices=True)
        self._save(x.value, out.value + 1)
        return out

    def unpool(self, x: Act, pooled: Act, height: int, width: int) -> Act:
        """Put each value where a pooling found the maximum."""
        indices = replace(pooled, value=pooled.value + 1)
        out = self._layer("unpool", [x], (x.channels, height, width), reads=[indices])
        self._save(indices.value)
        return out

    def mean(self, x: Act) -> Act:
        """Take the mean of each channel."""
        return self._layer("mean", [x], (x.channels, 1, 1))

    def upsample(self, x: Act) -> Act:
        """Repeat each row and column."""
        return self._layer("upsample", [x], (x.channels, 2 * x.height, 2 * x.width))

    def concat(self, a: Act, b: Act) -> Act:
        """Put channels behind each other."""
        shape = (a.channels + b.channels, a.height, a.width)
        return self._layer("concat", [a, b], shape)

    def add(self, a: Act, b: Act) -> Act:
        """Add; the gradients of both are that of the sum."""
        shape = (a.channels, a.height, a.width)
        return self._layer("add", [a, b], shape, is_sum=True)

    def loss(self, x: Act) -> Act:
        """Compare with labels: the softmax's logarithms are made, and one number."""
        out = self._layer("loss", [x], (1, 1, 1), samples=1)
        moment = len(self.operators) - 1
        value = self._value(self._bytes(x), moment, 1)
        self.operators[-1] = replace(self.operators[-1], outputs=(out.value, value))
        self._save(value)
        return out

    @contextmanager
    def module(self, path: str) -> Iterator[None]:
        """Let the layers inside belong to a module."""
        before, self.path = self.path, path
        call = [path, len(self.operators), 0]
        self.calls.append(call)
        yield
        call[2] = len(self.operators)
        self.path = before

    # The parts of a step.

    def _bytes(self, x: Act) -> int:
        return self.batch * x.elements * FLOAT_BYTES

    def _value(self, size: int, moment: int, output: int) -> int:
        kind = "activation" if moment >= 0 else "input"
        self.storages.append(Storage(size, kind, "", moment, 0, None))  # type: ignore[arg-type]
        storage = len(self.storages) - 1
        self.values.append(Value(storage, size, (size,), "float32", moment, output))
        return len(self.values) - 1

    def _save(self, *values: int) -> None:
        self.saved += [(value, len(self.operators) - 1) for value in values]

    def _layer(
        self,
        name: str,
        inputs: Sequence[Act],
        shape: tuple[int, int, int],
        *,
        flops: int = 0,
        parameters: int = 0,
        reads: Sequence[Act] = (),
        has_indices: bool = False,
        is_sum: bool = False,
        samples: int = 0,
    ) -> Act:
        moment = len(self.operators)
        count = (samples or self.batch) * prod(shape)
        sizes = [count * FLOAT_BYTES] + [count * INDEX_BYTES] * has_indices
        outputs = [self._value(size, moment, i) for i, size in enumerate(sizes)]
        read = [x.value for x in (*inputs, *reads)]
        moved = sum(sizes) + sum(self.values[v].bytes for v in read)
        moved += parameters * FLOAT_BYTES
        self._run("forward", name, read, outputs, flops, moved, self.path)
        out = Act(outputs[0], *shape)
        self.layers.append(_Layer(tuple(inputs), out, parameters, flops, moved, is_sum))
        self.parameters += parameters
        return out

    def _run(
        self,
        phase: str,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        flops: int,
        moved_bytes: int,
        path: str,
    ) -> None:
        seconds = max(flops / FLOPS_PER_S, moved_bytes / BYTES_PER_S)
        made = replace(
            operator(phase, seconds),
            name=f"{name}.{phase}",
            module_path=path,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            flops=flops,
            written_bytes=sum(self.values[value].bytes for value in outputs),
        )
        self.operators.append(made)

    def finish(self) -> StepGraph:
        """Return the step."""
        count = len(self.layers)
        gradients: dict[int, int] = {}
        for index in range(count - 1, -1, -1):
            self._backward(index, gradients)
        saved = [
            Saved(value, moment, (2 * count - 1 - moment,), 2 * count - moment, "", "")
            for value, moment in self.saved
        ]
        pictures = sum(s.bytes for s in self.storages if s.birth < 0)
        return StepGraph(
            operators=tuple(self.operators),
            values=tuple(self.values),
            storages=tuple(self._finished(s, saved) for s in range(len(self.storages))),
            saved=tuple(saved),
            calls=(ModuleCall("", 0, count), *(ModuleCall(*c) for c in self.calls)),
            backward_start=count,
            optimizer_start=2 * count,
            static=StaticBytes(self.parameters * FLOAT_BYTES, 0, pictures, 0),
        )

    def _backward(self, index: int, gradients: dict[int, int]) -> None:
        """Run the backward of a layer: gradients of its inputs and its parameters."""
        layer, moment = self.layers[index], len(self.operators)
        above = [gradients[v] for v in (layer.output.value,) if v in gradients]
        read = [v for v, m in self.saved if m == index] + above
        outputs, workspace = [], 0
        for x in layer.inputs:
            is_first = x.value not in gradients
            if self.values[x.value].operator < 0:
                continue
            if layer.is_sum and is_first:
                gradients[x.value] = above[0]
                continue
            if is_first:
                gradients[x.value] = self._value(self._bytes(x), moment, 0)
            else:
                # A second part of a gradient is made, and added to the first.
                workspace += self._bytes(x)
                read.append(gradients[x.value])
            outputs.append(gradients[x.value])
        if layer.parameters:
            outputs.append(self._value(layer.parameters * FLOAT_BYTES, moment, 1))
            self.storages[-1] = replace(self.storages[-1], kind="gradient")
        forward = self.operators[index]
        name, path = forward.name.removesuffix(".forward"), forward.module_path
        moved = 2 * layer.moved_bytes * (not layer.is_sum)
        self._run("backward", name, read, outputs, 2 * layer.flops, moved, path)
        self.operators[-1] = replace(self.operators[-1], workspace_bytes=workspace)

    def _finished(self, index: int, saved: Sequence[Saved]) -> Storage:
        """Return a storage with the end of its life."""
        storage, end = self.storages[index], len(self.operators)
        if storage.birth < 0 or storage.kind == "gradient":
            return replace(storage, death=end)
        uses = [
            moment
            for moment, op in enumerate(self.operators)
            if any(self.values[v].storage == index for v in (*op.inputs, *op.outputs))
        ]
        if storage.birth >= len(self.layers):
            return replace(storage, death=max(uses) + 1)
        last = max(use for use in uses if use < len(self.layers)) + 1
        freed = [s.freed for s in saved if self.values[s.value].storage == index]
        death = max([last, *freed])
        return replace(storage, death=death, released=last if freed else None)
