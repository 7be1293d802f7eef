"""Speech and music."""

from __future__ import annotations

from typing import Any

from benchmarks.architectures.architecture import (
    ENDS,
    LAYERS,
    PAIR,
    VISION,
    Architecture,
    of_transformers,
)
from benchmarks.architectures.batches import (
    CLASSES,
    SEQUENCE,
    VOCAB,
    WIDTH,
    draw_labelled_spectrogram,
    draw_spectrogram,
    draw_spectrogram_frames,
    draw_speech,
)

WAVES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    conv_dim=(WIDTH,) * 7,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    **ENDS,
)
SOUND: dict[str, Architecture] = {
    "whisper": of_transformers(
        "WhisperForConditionalGeneration",
        draw_spectrogram,
        num_mel_bins=8,
        max_source_positions=SEQUENCE,
        max_target_positions=64,
        **PAIR,
    ),
    "speech_to_text": of_transformers(
        "Speech2TextForConditionalGeneration",
        draw_spectrogram_frames,
        input_feat_per_channel=8,
        conv_channels=WIDTH,
        max_source_positions=64,
        max_target_positions=64,
        **PAIR,
    ),
    "wav2vec2": of_transformers("Wav2Vec2ForCTC", draw_speech, **WAVES),
    "hubert": of_transformers("HubertForCTC", draw_speech, **WAVES),
    "wavlm": of_transformers("WavLMForCTC", draw_speech, **WAVES),
    "audio_spectrogram": of_transformers(
        "ASTForAudioClassification",
        draw_labelled_spectrogram,
        num_labels=CLASSES,
        max_length=32,
        num_mel_bins=16,
        **{k: v for k, v in VISION.items() if k not in ("image_size", "patch_size")},
        patch_size=8,
    ),
}
