"""Diffusion: U-Nets and transformers that remove noise, and an autoencoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.case import Made, family


class Denoiser(nn.Module):
    """A network of diffusers, trained to say which noise was added."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, clean: Tensor, times: Tensor, **others: Any) -> Tensor:
        noise = torch.randn_like(clean)
        share = (times.float() / 1000)[:, None, None, None]
        mixed = (1 - share).sqrt() * clean + share.sqrt() * noise
        found = self.network(mixed, timestep=times, **others).sample
        return F.mse_loss(found[:, : clean.shape[1]], noise)


def denoiser(
    network: nn.Module, channels: int, size: int, side: int, others: Any = None
) -> Made:
    """Return a denoiser and its images; `others` makes what else it is given."""

    def batch(other: bool) -> dict[str, Tensor]:
        count = size - 1 if other else size
        return {
            "clean": torch.randn(count, channels, side, side),
            "times": torch.randint(0, 1000, (count,)),
            **({} if others is None else others(count)),
        }

    return Made(Denoiser(network).train(), batch)


@family("U-Net")
def diffusion_unet() -> Made:
    from diffusers import UNet2DModel

    network = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        dropout=0.1,
    )
    return denoiser(network, 3, 2, 32)


@family("U-Net")
def text_to_image_unet() -> Made:
    from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        dropout=0.1,
    )
    return denoiser(
        network,
        4,
        4,
        16,
        lambda count: {"encoder_hidden_states": torch.randn(count, 12, 32)},
    )


@family("diffusion transformer")
def dit() -> Made:
    from diffusers import DiTTransformer2DModel

    network = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=16,
        dropout=0.1,
        num_embeds_ada_norm=10,
    )
    return denoiser(
        network,
        4,
        8,
        16,
        lambda count: {"class_labels": torch.randint(0, 10, (count,))},
    )


@family("diffusion transformer")
def stable_diffusion_3() -> Made:
    from diffusers import SD3Transformer2DModel

    network = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    )
    return denoiser(
        network,
        4,
        8,
        16,
        lambda count: {
            "encoder_hidden_states": torch.randn(count, 12, 32),
            "pooled_projections": torch.randn(count, 32),
        },
    )


class Autoencoder(nn.Module):
    """The autoencoder of latent diffusion, with its two losses."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.network = AutoencoderKL(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            norm_num_groups=8,
        )

    def forward(self, images: Tensor) -> Tensor:
        latent = self.network.encode(images).latent_dist
        again = self.network.decode(latent.sample()).sample
        return F.mse_loss(again, images) + 1e-3 * latent.kl().mean()


@family("autoencoder")
def autoencoder_kl() -> Made:
    def batch(other: bool) -> Tensor:
        return torch.randn(1 if other else 2, 3, *((24, 24) if other else (32, 32)))

    return Made(Autoencoder(), batch)
