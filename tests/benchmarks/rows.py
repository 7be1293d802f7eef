"""Which rows of the table of architectures a test over all of them runs at each level."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

SLOW = {
    *("gpt2", "llama", "llama_padded", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"),
    *("gpt_neox", "opt", "bloom", "falcon", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"),
    *("mamba", "recurrent_gemma", "lstm", "bert_mlm", "encoder", "t5", "bart", "vit", "convnext"),
    *("resnet", "clip", "llava", "whisper", "wav2vec2", "unet", "sd3", "autoencoder_kl"),
}
"""Some of each kind. The others run at level full, and in the table."""


def by_level(names: Collection[str], quick: Collection[str]) -> list[Any]:
    """Mark each name with the level at which it first runs."""
    later = [name for name in names if name not in quick]
    return [*quick, *(pytest.param(name, marks=_mark(name)) for name in later)]


def _mark(name: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if name in SLOW else pytest.mark.long
