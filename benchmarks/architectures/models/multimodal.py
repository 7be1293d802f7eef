"""Images with text."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.architectures.architecture import (
    GROUPED,
    TEXT,
    VISION,
    Architecture,
    of_transformers,
)
from benchmarks.architectures.batches import (
    END,
    IMAGE,
    PATCH,
    START,
    WIDTH,
    Batch,
    draw_captioned_image,
    draw_image_beside_text,
    draw_image_in_text,
    draw_image_to_caption,
)


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def text_and_vision() -> dict[str, Any]:
    return dict(
        text_config=dict(**TEXT, intermediate_size=64),
        vision_config=VISION,
        projection_dim=WIDTH,
    )


SHARP = ("*norm*", "logit_scale")
"""Contrastive losses are sensitive to a scale near 1."""
MULTIMODAL: dict[str, Architecture] = {
    "clip": of_transformers(
        "CLIPModel",
        draw_captioned_image,
        contrastive_loss,
        config="CLIPConfig",
        keep_fp32=SHARP,
        **text_and_vision(),
    ),
    "siglip": of_transformers(
        "SiglipModel",
        draw_captioned_image,
        contrastive_loss,
        config="SiglipConfig",
        text_config=dict(**TEXT, intermediate_size=64),
        vision_config=VISION,
    ),
    "llava": of_transformers(
        "LlavaForConditionalGeneration",
        draw_image_in_text,
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config=dict(model_type="llama", **TEXT, **GROUPED),
        image_token_index=START,
        image_seq_length=(IMAGE // PATCH) ** 2,
    ),
    "paligemma": of_transformers(
        "PaliGemmaForConditionalGeneration",
        draw_image_in_text,
        vision_config={"model_type": "siglip_vision_model", **VISION},
        text_config=dict(model_type="gemma", head_dim=8, **TEXT, **GROUPED),
        image_token_index=START,
        projection_dim=WIDTH,
    ),
    "idefics3": of_transformers(
        "Idefics3ForConditionalGeneration",
        draw_image_beside_text,
        vision_config=VISION,
        text_config=dict(model_type="llama", **TEXT, **GROUPED),
        image_token_id=START,
        scale_factor=1,
        pad_token_id=1,
    ),
    "blip": of_transformers(
        "BlipForConditionalGeneration",
        draw_image_to_caption,
        text_config=dict(
            encoder_hidden_size=WIDTH, sep_token_id=END, **{**TEXT, "intermediate_size": 64}
        ),
        vision_config=VISION,
        projection_dim=WIDTH,
        image_text_hidden_size=WIDTH,
    ),
    "blip_2": of_transformers(
        "Blip2ForConditionalGeneration",
        draw_image_in_text,
        config="Blip2Config",
        vision_config=VISION,
        qformer_config=dict(
            encoder_hidden_size=WIDTH, intermediate_size=64, **{k: v for k, v in TEXT.items()}
        ),
        text_config=dict(model_type="opt", ffn_dim=64, word_embed_proj_dim=WIDTH, **TEXT),
        num_query_tokens=(IMAGE // PATCH) ** 2,
        image_token_index=START,
        image_text_hidden_size=WIDTH,
    ),
    "git": of_transformers(
        "GitForCausalLM",
        draw_image_to_caption,
        vision_config=VISION,
        intermediate_size=64,
        **TEXT,
    ),
}
