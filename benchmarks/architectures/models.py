"""The architectures: random weights, small shapes, every other setting as its package has it.

Widths, depths, vocabularies and windows are shrunk to the data's size; token ids that a package
takes from a vocabulary of its own are moved into this one. Dropout, caches, attention, experts and
losses are the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
import transformers
from torch import Generator, Tensor, nn

from benchmarks.architectures.batches import (
    CLASSES,
    END,
    IMAGE,
    PAD,
    PATCH,
    SEQUENCE,
    START,
    VOCAB,
    WIDTH,
    Batch,
    draw_captioned_image,
    draw_image_in_text,
    draw_labelled_image,
    draw_masked_text,
    draw_noisy_latents,
    draw_padded_text,
    draw_pair_of_texts,
    draw_series,
    draw_spectrogram,
    draw_speech,
    draw_text,
)

LAYERS = 3  # one more than a streamed run has slots for


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One line of the table.

    Attributes:
        build: the model, its weights drawn from torch's default generator.
        batch: what one microbatch is made of, drawn from the generator given.
        loss_of: the model's loss on it, as its users compute it.
        impossible: cell → why the library refuses it.
        options: of `offload` in every cell.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]
    loss_of: Callable[[nn.Module, Batch], Tensor]
    impossible: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that Hugging Face's models return."""
    loss: Tensor = model(**batch).loss
    return loss


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def unet_loss(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["sample"], batch["timestep"], batch["condition"]).sample
    return F.mse_loss(found.float(), batch["noise"])


def transformer_2d_loss(model: nn.Module, batch: Batch) -> Tensor:
    found = model(
        hidden_states=batch["sample"],
        encoder_hidden_states=batch["condition"],
        pooled_projections=batch["pooled"],
        timestep=batch["timestep"],
    ).sample
    return F.mse_loss(found.float(), batch["noise"])


def next_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["series"]).float(), batch["next"])


class Recurrent(nn.Module):
    """LSTMs one above the other, each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        lstms = (nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True) for _ in range(LAYERS))
        self.lstms = nn.ModuleList(lstms)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, series: Tensor) -> Tensor:
        for lstm in self.lstms:
            series, _ = lstm(series)
        found: Tensor = self.head(series)
        return found


class Encoder(nn.Module):
    """torch's own transformer, dropout 0.1 as it has it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, series: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(series))
        return found


def of_transformers(
    model: str,
    draw: Callable[[Generator], Batch] = draw_text,
    loss_of: Callable[[nn.Module, Batch], Tensor] = own_loss,
    *,
    config: str = "",
    impossible: Mapping[str, str] | None = None,
    keep_fp32: Sequence[str] = (),
    **configured: Any,
) -> Architecture:
    """A class of `transformers` by name; its configuration's name follows from it if not given."""
    family, _, _ = model.partition("For")

    def build() -> nn.Module:
        made = getattr(transformers, config or f"{family}Config")(**configured)
        built: nn.Module = getattr(transformers, model)(made)
        return built

    return Architecture(
        build=build,
        batch=draw,
        loss_of=loss_of,
        impossible=impossible or {},
        options={"keep_fp32": keep_fp32} if keep_fp32 else {},
    )


def decoder(model: str, *, config: str = "", **options: Any) -> Architecture:
    """A causal language model in the words that most decoders' configurations share."""
    return of_transformers(model, config=config, **{**TEXT, **options})


ENDS: dict[str, Any] = dict(pad_token_id=PAD, bos_token_id=START, eos_token_id=END)
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    max_position_embeddings=64,
    **ENDS,
)
GROUPED: dict[str, Any] = dict(num_key_value_heads=2, intermediate_size=64)
PAIR: dict[str, Any] = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    decoder_start_token_id=START,
    **ENDS,
)
VISION: dict[str, Any] = dict(
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    image_size=IMAGE,
    patch_size=PATCH,
)
RUNNING_STATISTICS = (
    "running statistics of batch norm would be updated a second time by a forward that runs again"
)


def text_and_vision() -> dict[str, Any]:
    return dict(
        text_config=dict(**TEXT, intermediate_size=64),
        vision_config=VISION,
        projection_dim=WIDTH,
    )


def diffusion_unet() -> nn.Module:
    import diffusers  # takes seconds

    net: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(WIDTH, 2 * WIDTH),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
        norm_num_groups=8,
    )
    return net


def diffusion_transformer() -> nn.Module:
    import diffusers

    net: nn.Module = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=LAYERS,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
    )
    return net


LLAMA = decoder("LlamaForCausalLM", **GROUPED)
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": decoder("GPT2LMHeadModel", config="GPT2Config"),
    "llama": LLAMA,
    "llama_padded": Architecture(build=LLAMA.build, batch=draw_padded_text, loss_of=own_loss),
    "mistral": decoder("MistralForCausalLM", sliding_window=8, **GROUPED),
    "qwen2": decoder("Qwen2ForCausalLM", **GROUPED),
    "qwen3": decoder("Qwen3ForCausalLM", head_dim=8, **GROUPED),
    "qwen3_moe": decoder(
        "Qwen3MoeForCausalLM",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **GROUPED,
    ),
    "mixtral": decoder("MixtralForCausalLM", num_local_experts=4, **GROUPED),
    "gemma2": decoder("Gemma2ForCausalLM", head_dim=8, sliding_window=8, **GROUPED),
    "gemma3": decoder(
        "Gemma3ForCausalLM", config="Gemma3TextConfig", head_dim=8, sliding_window=8, **GROUPED
    ),
    "phi3": decoder("Phi3ForCausalLM", **GROUPED),
    "gpt_neox": decoder("GPTNeoXForCausalLM", intermediate_size=64),
    "gpt_oss": decoder(
        "GptOssForCausalLM",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        **GROUPED,
    ),
    "deepseek_v3": decoder(
        "DeepseekV3ForCausalLM",
        intermediate_size=64,
        moe_intermediate_size=32,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "opt": decoder("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=WIDTH),
    "bloom": of_transformers(
        "BloomForCausalLM",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        **ENDS,
    ),
    "falcon": decoder("FalconForCausalLM"),
    "mamba": of_transformers(
        "MambaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        state_size=8,
        num_hidden_layers=LAYERS,
        **ENDS,
    ),
    "t5": of_transformers(
        "T5ForConditionalGeneration",
        draw_pair_of_texts,
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=LAYERS,
        num_heads=4,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=START,
    ),
    "bart": of_transformers(
        "BartForConditionalGeneration",
        draw_pair_of_texts,
        max_position_embeddings=64,
        forced_eos_token_id=END,
        **PAIR,
    ),
    "bert_mlm": of_transformers(
        "BertForMaskedLM",
        draw_masked_text,
        intermediate_size=64,
        **TEXT,
    ),
    "vit": of_transformers(
        "ViTForImageClassification", draw_labelled_image, num_labels=CLASSES, **VISION
    ),
    "whisper": of_transformers(
        "WhisperForConditionalGeneration",
        draw_spectrogram,
        num_mel_bins=8,
        max_source_positions=SEQUENCE,
        max_target_positions=64,
        **PAIR,
    ),
    "clip": of_transformers(
        "CLIPModel",
        draw_captioned_image,
        contrastive_loss,
        config="CLIPConfig",
        keep_fp32=("*norm*", "logit_scale"),
        **text_and_vision(),
    ),
    "llava": of_transformers(
        "LlavaForConditionalGeneration",
        draw_image_in_text,
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config=dict(model_type="llama", **TEXT, **GROUPED),
        image_token_index=START,
        image_seq_length=(IMAGE // PATCH) ** 2,
    ),
    "wav2vec2": of_transformers(
        "Wav2Vec2ForCTC",
        draw_speech,
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        conv_dim=(WIDTH,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        **ENDS,
    ),
    "convnext": of_transformers(
        "ConvNextForImageClassification",
        draw_labelled_image,
        hidden_sizes=[16, 32, 32],
        depths=[1, 1, 1],
        num_stages=LAYERS,
        num_labels=CLASSES,
    ),
    "resnet": of_transformers(
        "ResNetForImageClassification",
        draw_labelled_image,
        embedding_size=16,
        hidden_sizes=[16, 32, 32],
        depths=[1, 1, 1],
        num_labels=CLASSES,
        impossible={"recompute": RUNNING_STATISTICS, "offload": RUNNING_STATISTICS},
    ),
    "unet": Architecture(build=diffusion_unet, batch=draw_noisy_latents, loss_of=unet_loss),
    "sd3": Architecture(
        build=diffusion_transformer, batch=draw_noisy_latents, loss_of=transformer_2d_loss
    ),
    "lstm": Architecture(build=Recurrent, batch=draw_series, loss_of=next_loss),
    "encoder": Architecture(build=Encoder, batch=draw_series, loss_of=next_loss),
}
