"""Training steps of well-known convolutional networks, from their layers.

The tables are those of the papers: kernels, channels and strides. What a layer takes,
makes and saves stands in `layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from membudget.graph import StepGraph
from tests.planner.layers import Act, Net

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
