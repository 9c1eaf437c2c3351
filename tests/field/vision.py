"""Vision: transformers, ConvNets with and without BatchNorm, segmentation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.case import Made, family

CLASSES = 10


def labelled(size: int, side: int, smaller_side: int) -> Any:
    """Return a function that makes images and their classes."""

    def batch(other: bool) -> tuple[Tensor]:
        count, length = (max(2, size - 1), smaller_side) if other else (size, side)
        return (torch.randn(count, 3, length, length),)

    return batch


def classified(logits: Tensor, batch: Any) -> Tensor:
    """Return the loss of images whose classes count up."""
    return F.cross_entropy(logits, torch.arange(len(logits)) % CLASSES)


def timm_model(
    name: str, size: int, side: int, smaller_side: int | None = None, **options: Any
) -> Made:
    """Return a model of timm with random weights."""
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    batch = labelled(size, side, smaller_side or side)
    return Made(model.train(), batch, classified)


@family("vision transformer")
def vit_drop_path() -> Made:
    return timm_model(
        "vit_tiny_patch16_224",
        6,
        64,
        img_size=64,
        patch_size=8,
        embed_dim=96,
        depth=4,
        num_heads=4,
        drop_path_rate=0.2,
        proj_drop_rate=0.1,
    )


@family("vision transformer")
def swin_drop_path() -> Made:
    return timm_model(
        "swin_tiny_patch4_window7_224",
        6,
        64,
        img_size=64,
        window_size=4,
        embed_dim=32,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.2,
    )


@family("vision transformer")
def deit3_layer_scale() -> Made:
    return timm_model(
        "deit3_small_patch16_224",
        8,
        64,
        img_size=64,
        patch_size=8,
        embed_dim=96,
        depth=3,
        num_heads=4,
        drop_path_rate=0.1,
    )


@family("vision transformer")
def mixer_mlp() -> Made:
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(
        CLASSES,
        img_size=64,
        patch_size=8,
        embed_dim=96,
        num_blocks=4,
        drop_path_rate=0.1,
        proj_drop_rate=0.1,
    )
    return Made(model.train(), labelled(6, 64, 64), classified)


@family("convolution without BatchNorm")
def convnext_drop_path() -> Made:
    return timm_model(
        "convnext_atto",
        4,
        64,
        48,
        depths=(1, 1, 2, 1),
        dims=(24, 48, 64, 96),
        drop_path_rate=0.2,
    )


@family("convolution without BatchNorm")
def convnext_v2() -> Made:
    return timm_model(
        "convnextv2_atto", 4, 64, 48, depths=(1, 1, 2, 1), dims=(24, 48, 64, 96)
    )


@family("convolution without BatchNorm")
def nfnet_weight_standardised() -> Made:
    return timm_model(
        "nf_resnet26", 8, 64, 48, depths=(1, 1, 1, 1), channels=(32, 48, 64, 96)
    )


@family("convolution with BatchNorm")
def resnet_in_place() -> Made:
    return timm_model("resnet18", 8, 64, 48, channels=(16, 32, 48, 64))


@family("convolution with BatchNorm")
def efficientnet() -> Made:
    return timm_model(
        "test_efficientnet", 16, 64, 48, drop_rate=0.2, drop_path_rate=0.2
    )


@family("convolution with BatchNorm")
def mobilenet_v3() -> Made:
    from torchvision.models import mobilenet_v3_small

    model = mobilenet_v3_small(num_classes=CLASSES, width_mult=0.5)
    return Made(model.train(), labelled(16, 64, 48), classified)


@family("convolution with BatchNorm")
def densenet() -> Made:
    from torchvision.models import DenseNet

    model = DenseNet(12, (3, 3, 3), 24, drop_rate=0.1, num_classes=CLASSES)
    return Made(model.train(), labelled(8, 64, 48), classified)


@family("convolution with BatchNorm")
def shufflenet() -> Made:
    from torchvision.models import ShuffleNetV2

    model = ShuffleNetV2([2, 3, 2], [24, 48, 96, 128, 192], num_classes=CLASSES)
    return Made(model.train(), labelled(16, 64, 48), classified)


@family("segmentation")
def deeplab() -> Made:
    from torchvision.models import ResNet
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import BasicBlock
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3

    trunk = ResNet(BasicBlock, [1, 1, 1, 1])
    trunk.layer3, trunk.layer4 = nn.Identity(), nn.Identity()
    body = IntermediateLayerGetter(trunk, {"layer2": "out"})
    head = DeepLabHead(128, CLASSES, (3, 6))
    return Made(DeepLabV3(body, head).train(), labelled(6, 64, 48), segmented)


def segmented(output: dict[str, Tensor], batch: tuple[Tensor]) -> Tensor:
    """Return the loss of pixels whose class their brightness gives."""
    brightness = batch[0].mean(1).clamp(-1, 0.99)
    classes = ((brightness + 1) / 2 * CLASSES).long()
    return F.cross_entropy(output["out"], classes)


class DoubleConvolution(nn.Sequential):
    """Two convolutions with BatchNorm, ReLU in place, and dropout."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(
            nn.Conv2d(first, second, 3, padding=1),
            nn.BatchNorm2d(second),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.1),
            nn.Conv2d(second, second, 3, padding=1),
            nn.BatchNorm2d(second),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """The U-Net of 2015, three levels deep."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            DoubleConvolution(*pair)
            for pair in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1]
        )
        self.merge = nn.ModuleList(DoubleConvolution(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        skips = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return {"out": self.head(x)}


@family("U-Net")
def unet() -> Made:
    return Made(UNet(), labelled(4, 64, 48), segmented)
