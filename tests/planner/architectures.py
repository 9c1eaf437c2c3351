"""Training steps of well-known convolutional networks, written down from their layers.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod

from membudget.graph import (
    ModuleCall,
    Saved,
    StaticBytes,
    StepGraph,
    Storage,
    Value,
)
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
        elements = 3 * height * width
        value = self._value(self.batch * elements * FLOAT_BYTES, -1, 0)
        return Act(value, 3, height, width)

    def conv(
        self, x: Act, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1
    ) -> Act:
        """Convolve, padded so that a stride of 1 keeps the size."""
        height, width = -(-x.height // stride), -(-x.width // stride)
        weights = kernel * kernel * (x.channels // groups) * channels
        flops = 2 * weights * height * width * self.batch
        out = self._layer(
            "conv", [x], (channels, height, width), flops=flops, parameters=weights
        )
        self._save(x.value)
        return out

    def linear(self, x: Act, features: int) -> Act:
        """Multiply by a matrix."""
        weights = x.elements * features
        flops = 2 * weights * self.batch
        out = self._layer(
            "linear", [x], (features, 1, 1), flops=flops, parameters=weights + features
        )
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
        height, width = -(-x.height // size), -(-x.width // size)
        shape = (x.channels, height, width)
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
        return self._layer("concat", [a, b], (a.channels + b.channels, *_size(a)))

    def add(self, a: Act, b: Act) -> Act:
        """Add; the gradients of both are that of the sum."""
        return self._layer("add", [a, b], (a.channels, *_size(a)), is_sum=True)

    def loss(self, x: Act) -> Act:
        """Compare with labels: the softmax's logarithms are made, and one number."""
        out = self._layer("loss", [x], (1, 1, 1), samples=1)
        moment = len(self.operators) - 1
        value = self._value(self._bytes(x), moment, 1)
        made = replace(self.operators[moment], outputs=(out.value, value))
        self.operators[moment] = made
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
        output = Act(outputs[0], *shape)
        self.layers.append(
            _Layer(tuple(inputs), output, parameters, flops, moved, is_sum)
        )
        self.parameters += parameters
        return output

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
        return StepGraph(
            operators=tuple(self.operators),
            values=tuple(self.values),
            storages=tuple(self._finished(s, saved) for s in range(len(self.storages))),
            saved=tuple(saved),
            calls=(ModuleCall("", 0, count), *(ModuleCall(*c) for c in self.calls)),
            backward_start=count,
            optimizer_start=2 * count,
            static=StaticBytes(self.parameters * FLOAT_BYTES, 0, self._input_bytes, 0),
        )

    @property
    def _input_bytes(self) -> int:
        return sum(s.bytes for s in self.storages if s.birth < 0)

    def _backward(self, index: int, gradients: dict[int, int]) -> None:
        """Run the backward of a layer: gradients of its inputs and its parameters."""
        layer, moment = self.layers[index], len(self.operators)
        above = gradients.get(layer.output.value)
        read = [v for v, m in self.saved if m == index]
        read += [above] if above is not None else []
        outputs = []
        workspace = 0
        wanted = [x for x in layer.inputs if self.values[x.value].operator >= 0]
        for x in wanted:
            if layer.is_sum and above is not None and x.value not in gradients:
                gradients[x.value] = above
                continue
            if x.value in gradients:
                # A second part of a gradient is made and added to the first.
                workspace += self._bytes(x)
                read.append(gradients[x.value])
            else:
                gradients[x.value] = self._value(self._bytes(x), moment, 0)
            outputs.append(gradients[x.value])
        if layer.parameters:
            outputs.append(self._value(layer.parameters * FLOAT_BYTES, moment, 1))
            storage = self.values[outputs[-1]].storage
            self.storages[storage] = replace(self.storages[storage], kind="gradient")
        name = self.operators[index].name.removesuffix(".forward")
        path = self.operators[index].module_path
        flops, moved = 2 * layer.flops, 2 * layer.moved_bytes * (not layer.is_sum)
        self._run("backward", name, read, outputs, flops, moved, path)
        made = replace(self.operators[moment], workspace_bytes=workspace)
        self.operators[moment] = made

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


def _size(x: Act) -> tuple[int, int]:
    return x.height, x.width


# The networks.

VGG16 = (2, 2, 3, 3, 3)
VGG19 = (2, 2, 4, 4, 4)
VGG_CHANNELS = (64, 128, 256, 512, 512)


def vgg(depths: Sequence[int], batch: int = 64, size: int = 224) -> StepGraph:
    """Return VGG (Simonyan and Zisserman 2015), without dropout.

    Args:
        depths: Convolutions of each stage.
        batch: Samples.
        size: Of a side of a picture.
    """
    net = Net(batch)
    x = net.image(size, size)
    for stage, (depth, channels) in enumerate(zip(depths, VGG_CHANNELS, strict=True)):
        with net.module(f"stage{stage}"):
            for _ in range(depth):
                x = net.relu(net.conv(x, channels))
            x = net.pool(x)
    with net.module("classifier"):
        for _ in range(2):
            x = net.relu(net.linear(x, 4096))
        x = net.linear(x, 1000)
    net.loss(x)
    return net.finish()


def vgg16(batch: int = 64) -> StepGraph:
    """Return VGG-16."""
    return vgg(VGG16, batch)


def vgg19(batch: int = 64) -> StepGraph:
    """Return VGG-19."""
    return vgg(VGG19, batch)


def segnet(batch: int = 16, height: int = 384, width: int = 480) -> StepGraph:
    """Return SegNet (Badrinarayanan et al. 2017): VGG-16 there and back again."""
    net = Net(batch)
    x = net.image(height, width)
    pooled: list[tuple[Act, Act]] = []
    for stage, (depth, channels) in enumerate(zip(VGG16, VGG_CHANNELS, strict=True)):
        with net.module(f"encoder{stage}"):
            for _ in range(depth):
                x = net.norm(net.conv(x, channels))
            pooled.append((x, x := net.pool(x)))
    # The last convolution of each stage goes over to the channels of the next.
    after = (*VGG_CHANNELS[3::-1], 0)
    rows = zip(VGG16[::-1], VGG_CHANNELS[::-1], after, pooled[::-1], strict=True)
    for stage, (depth, channels, following, (before, small)) in enumerate(rows):
        with net.module(f"decoder{stage}"):
            x = net.unpool(x, small, before.height, before.width)
            for _ in range(depth - 1):
                x = net.norm(net.conv(x, channels))
            x = net.norm(net.conv(x, following)) if following else net.conv(x, 12)
    net.loss(x)
    return net.finish()


def unet(batch: int = 8, height: int = 416, width: int = 608) -> StepGraph:
    """Return a U-Net (Ronneberger et al. 2015) whose way down is VGG-16's."""
    net = Net(batch)
    x = net.image(height, width)
    skips: list[Act] = []
    for stage, (depth, channels) in enumerate(
        zip(VGG16[:4], VGG_CHANNELS[:4], strict=True)
    ):
        with net.module(f"down{stage}"):
            for _ in range(depth):
                x = net.relu(net.conv(x, channels))
            x = net.pool(x)
            skips.append(x)
    with net.module("middle"):
        x = net.norm(net.conv(skips.pop(), 512))
    for stage, channels in enumerate((256, 128, 64)):
        with net.module(f"up{stage}"):
            x = net.concat(net.upsample(x), skips.pop())
            x = net.norm(net.conv(x, channels))
    net.loss(net.conv(x, 12))
    return net.finish()


# Stride and channels of each depthwise and pointwise pair.
MOBILENET = (
    *((1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512)),
    *((1, 512),) * 5,
    *((2, 1024), (1, 1024)),
)


def mobilenet(batch: int = 64, size: int = 224) -> StepGraph:
    """Return MobileNet (Howard et al. 2017)."""
    net = Net(batch)
    x = net.norm(net.conv(net.image(size, size), 32, stride=2))
    for block, (stride, channels) in enumerate(MOBILENET):
        with net.module(f"block{block}"):
            x = net.norm(net.conv(x, x.channels, stride=stride, groups=x.channels))
            x = net.norm(net.conv(x, channels, kernel=1))
    net.loss(net.linear(net.mean(x), 1000))
    return net.finish()


# Blocks, channels inside, and stride of each stage.
RESNET50 = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))


def resnet50(batch: int = 64, size: int = 224) -> StepGraph:
    """Return ResNet-50 (He et al. 2016), strides in the 3 x 3 convolutions."""
    net = Net(batch)
    x = net.norm(net.conv(net.image(size, size), 64, kernel=7, stride=2))
    x = net.pool(x)
    for stage, (blocks, channels, stride) in enumerate(RESNET50):
        for block in range(blocks):
            with net.module(f"stage{stage}.{block}"):
                x = _bottleneck(net, x, channels, stride if block == 0 else 1)
    net.loss(net.linear(net.mean(x), 1000))
    return net.finish()


def _bottleneck(net: Net, x: Act, channels: int, stride: int) -> Act:
    y = net.norm(net.conv(x, channels, kernel=1))
    y = net.norm(net.conv(y, channels, stride=stride))
    y = net.norm(net.conv(y, 4 * channels, kernel=1))
    if x.channels != 4 * channels:
        x = net.norm(net.conv(x, 4 * channels, kernel=1, stride=stride))
    return net.relu(net.add(y, x))


ARCHITECTURES: dict[str, Callable[[], StepGraph]] = {
    "vgg16": vgg16,
    "vgg19": vgg19,
    "segnet": segnet,
    "mobilenet": mobilenet,
    "unet": unet,
    "resnet50": resnet50,
}
