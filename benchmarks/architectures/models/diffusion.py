"""Denoisers and autoencoders of `diffusers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.architectures.architecture import LAYERS, Architecture
from benchmarks.architectures.batches import (
    CLASSES,
    IMAGE,
    WIDTH,
    Batch,
    draw_image,
    draw_labelled_latents,
    draw_noisy_latents,
    draw_noisy_tokens,
    draw_noisy_video,
)

HEADS: dict[str, Any] = dict(num_layers=LAYERS, num_attention_heads=4, attention_head_dim=8)
LATENTS: dict[str, Any] = dict(sample_size=8, in_channels=4, out_channels=4)
STEPS: dict[str, Any] = dict(block_out_channels=(WIDTH, 2 * WIDTH), norm_num_groups=8)


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the noise found; the other entries are the forward's arguments."""
    given = {name: tensor for name, tensor in batch.items() if name != "noise"}
    return F.mse_loss(model(**given).sample.float(), batch["noise"])


def reconstruction_loss(model: nn.Module, batch: Batch) -> Tensor:
    images = batch["pixel_values"]
    return F.mse_loss(model(images).sample.float(), images)


def of_diffusers(
    model: str,
    draw: Callable[[Generator], Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor] = denoising_loss,
    **configured: Any,
) -> Architecture:
    """A class of `diffusers` by name."""

    def build() -> nn.Module:
        import diffusers  # takes seconds

        built: nn.Module = getattr(diffusers, model)(**configured)
        return built

    return Architecture(build=build, batch=draw, loss_of=loss_of)


def latents(image: str, **conditions: str) -> Callable[[Generator], Batch]:
    """Noisy latents under the names of a forward's arguments.

    Args:
        image: the argument that takes the latents.
        conditions: argument → "condition" (a text's states) or "pooled" (one state of a text).
    """

    def draw(source: Generator) -> Batch:
        drawn = draw_noisy_latents(source)
        given = {argument: drawn[name] for argument, name in conditions.items()}
        return {
            image: drawn["sample"],
            "timestep": drawn["timestep"],
            **given,
            "noise": drawn["noise"],
        }

    return draw


CONDITIONED = latents("hidden_states", encoder_hidden_states="condition")
DIFFUSION: dict[str, Architecture] = {
    "unet": of_diffusers(
        "UNet2DConditionModel",
        latents("sample", encoder_hidden_states="condition"),
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
        **STEPS,
    ),
    "unet_unconditional": of_diffusers(
        "UNet2DModel",
        latents("sample"),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **LATENTS,
        **STEPS,
    ),
    "sd3": of_diffusers(
        "SD3Transformer2DModel",
        latents("hidden_states", encoder_hidden_states="condition", pooled_projections="pooled"),
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        **LATENTS,
        **HEADS,
    ),
    "dit": of_diffusers(
        "DiTTransformer2DModel",
        draw_labelled_latents,
        norm_num_groups=8,
        num_embeds_ada_norm=CLASSES,
        **LATENTS,
        **HEADS,
    ),
    "pixart": of_diffusers(
        "PixArtTransformer2DModel",
        CONDITIONED,
        norm_num_groups=8,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
        **LATENTS,
        **HEADS,
    ),
    "sana": of_diffusers(
        "SanaTransformer2DModel",
        CONDITIONED,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
        **LATENTS,
        **HEADS,
    ),
    "aura_flow": of_diffusers(
        "AuraFlowTransformer2DModel",
        CONDITIONED,
        num_mmdit_layers=LAYERS,
        num_single_dit_layers=LAYERS,
        num_attention_heads=4,
        attention_head_dim=8,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pos_embed_max_size=64,
        **LATENTS,
    ),
    "flux": of_diffusers(
        "FluxTransformer2DModel",
        draw_noisy_tokens,
        in_channels=4,
        num_single_layers=LAYERS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 2, 2),
        **HEADS,
    ),
    "cogvideox": of_diffusers(
        "CogVideoXTransformer3DModel",
        draw_noisy_video,
        in_channels=4,
        out_channels=4,
        time_embed_dim=WIDTH,
        text_embed_dim=WIDTH,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        max_text_seq_length=8,
        **HEADS,
    ),
    "autoencoder_kl": of_diffusers(
        "AutoencoderKL",
        draw_image,
        reconstruction_loss,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=IMAGE,
        **STEPS,
    ),
    "vq_model": of_diffusers(
        "VQModel",
        draw_image,
        reconstruction_loss,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=32,
        **STEPS,
    ),
}
