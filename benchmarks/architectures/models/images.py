"""Classifiers, segmenters and detectors of images."""

from __future__ import annotations

from typing import Any

from benchmarks.architectures.architecture import LAYERS, VISION, Architecture, of_transformers
from benchmarks.architectures.batches import (
    CLASSES,
    IMAGE,
    PATCH,
    draw_image,
    draw_labelled_image,
    draw_segmented_image,
)

STAGES: dict[str, Any] = dict(hidden_sizes=[16, 32, 32], depths=[1, 1, 1])
WINDOWS: dict[str, Any] = dict(
    image_size=IMAGE,
    patch_size=4,
    embed_dim=16,
    depths=[1, 1, 1],
    num_heads=[2, 2, 4],
    window_size=2,
)


def classifier(family: str, **options: Any) -> Architecture:
    return of_transformers(
        f"{family}ForImageClassification", draw_labelled_image, num_labels=CLASSES, **options
    )


IMAGES_ALONE: dict[str, Architecture] = {
    "vit": classifier("ViT", **VISION),
    "deit": classifier("DeiT", **VISION),
    "beit": classifier("Beit", use_relative_position_bias=True, **VISION),
    "dinov2": classifier("Dinov2", **VISION),
    "vit_mae": of_transformers(
        "ViTMAEForPreTraining",
        draw_image,
        config="ViTMAEConfig",
        decoder_hidden_size=32,
        decoder_intermediate_size=64,
        decoder_num_hidden_layers=LAYERS,
        decoder_num_attention_heads=4,
        **{**VISION, "patch_size": PATCH // 2},
    ),
    "swin": classifier("Swin", **WINDOWS),
    "swinv2": classifier("Swinv2", **WINDOWS),
    "convnext": classifier("ConvNext", num_stages=LAYERS, **STAGES),
    "convnextv2": classifier("ConvNextV2", num_stages=LAYERS, **STAGES),
    "resnet": classifier("ResNet", embedding_size=16, **STAGES),
    "mobilevit": classifier(
        "MobileViT",
        image_size=IMAGE,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 16, 16, 24, 24, 32, 64],
    ),
    "segformer": of_transformers(
        "SegformerForSemanticSegmentation",
        draw_segmented_image,
        num_labels=CLASSES,
        num_encoder_blocks=3,
        depths=[1, 1, 1],
        sr_ratios=[4, 2, 1],
        hidden_sizes=[16, 16, 32],
        patch_sizes=[7, 3, 3],
        strides=[4, 2, 2],
        num_attention_heads=[1, 2, 4],
        mlp_ratios=[2, 2, 2],
        decoder_hidden_size=32,
    ),
}
