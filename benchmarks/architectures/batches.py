"""What the architectures are trained on: random tokens, images, sounds and latents."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

Batch = dict[str, Tensor]
VOCAB, WIDTH, BATCH, SEQUENCE = 128, 32, 2, 16
CLASSES, IMAGE, PATCH, IMAGES, PAIRS = 10, 32, 16, 8, 32
PAD, START, END = 1, 2, 3  # tokens of data begin at 4


def draw_tokens(source: Generator, length: int = SEQUENCE, count: int = BATCH) -> Tensor:
    return torch.randint(END + 1, VOCAB, (count, length), generator=source)


def draw_images(source: Generator, count: int = BATCH) -> Tensor:
    return torch.randn(count, 3, IMAGE, IMAGE, generator=source)


def draw_latents(source: Generator) -> Tensor:
    return torch.randn(BATCH, 4, 8, 8, generator=source)


def draw_text(source: Generator) -> Batch:
    tokens = draw_tokens(source)
    return {"input_ids": tokens, "labels": tokens}


def draw_padded_text(source: Generator) -> Batch:
    """The first row has a quarter of padding, on the left."""
    tokens = draw_tokens(source)
    tokens[0, : SEQUENCE // 4] = PAD
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PAD).long(),
        "labels": tokens.masked_fill(tokens == PAD, -100),
    }


def draw_masked_text(source: Generator) -> Batch:
    tokens = draw_tokens(source)
    hidden = torch.rand(tokens.shape, generator=source) < 0.3
    hidden[:, 0] = True
    labels = tokens.masked_fill(~hidden, -100)
    return {"input_ids": tokens.masked_fill(hidden, START), "labels": labels}


def draw_pair_of_texts(source: Generator) -> Batch:
    return {"input_ids": draw_tokens(source), "labels": draw_tokens(source, SEQUENCE // 2)}


def draw_labelled_image(source: Generator) -> Batch:
    labels = torch.randint(CLASSES, (IMAGES,), generator=source)
    return {"pixel_values": draw_images(source, IMAGES), "labels": labels}


def draw_image(source: Generator) -> Batch:
    return {"pixel_values": draw_images(source)}


def draw_segmented_image(source: Generator) -> Batch:
    labels = torch.randint(CLASSES, (BATCH, IMAGE, IMAGE), generator=source)
    return {"pixel_values": draw_images(source), "labels": labels}


def draw_captioned_image(source: Generator) -> Batch:
    """So many pairs that some loss is left: of nothing, no relative deviation can be told."""
    tokens = draw_tokens(source, count=PAIRS)
    tokens[:, -1] = END
    return {"input_ids": tokens, "pixel_values": draw_images(source, PAIRS)}


def draw_image_in_text(source: Generator) -> Batch:
    """The image's patches take the place of the first tokens."""
    tokens = draw_tokens(source)
    patches = (IMAGE // PATCH) ** 2
    tokens[:, :patches] = START
    labels = tokens.masked_fill(tokens == START, -100)
    return {"input_ids": tokens, "pixel_values": draw_images(source), "labels": labels}


def draw_image_beside_text(source: Generator) -> Batch:
    """As `draw_image_in_text`, for models that take several images per text."""
    drawn = draw_image_in_text(source)
    return {**drawn, "pixel_values": drawn["pixel_values"][:, None]}


def draw_spectrogram(source: Generator) -> Batch:
    features = torch.randn(BATCH, 8, 2 * SEQUENCE, generator=source)
    return {"input_features": features, "labels": draw_tokens(source)}


def draw_image_to_caption(source: Generator) -> Batch:
    return {**draw_text(source), "pixel_values": draw_images(source)}


def draw_spectrogram_frames(source: Generator) -> Batch:
    """Time before frequency."""
    features = torch.randn(BATCH, 2 * SEQUENCE, 8, generator=source)
    return {"input_features": features, "labels": draw_tokens(source)}


def draw_labelled_spectrogram(source: Generator) -> Batch:
    labels = torch.randint(CLASSES, (IMAGES,), generator=source)
    return {"input_values": torch.randn(IMAGES, 32, 16, generator=source), "labels": labels}


def draw_speech(source: Generator) -> Batch:
    return {
        "input_values": torch.randn(BATCH, 4000, generator=source),
        "labels": draw_tokens(source, 4),
    }


def draw_noisy_latents(source: Generator) -> Batch:
    """Timesteps of diffusion are real numbers, as flow matching draws them."""
    return {
        "sample": draw_latents(source),
        "timestep": 1000 * torch.rand(BATCH, generator=source),
        "condition": torch.randn(BATCH, 8, WIDTH, generator=source),
        "pooled": torch.randn(BATCH, WIDTH, generator=source),
        "noise": draw_latents(source),
    }


def draw_labelled_latents(source: Generator) -> Batch:
    """Whole timesteps, which select rows of a table, and a class to draw."""
    return {
        "hidden_states": draw_latents(source),
        "timestep": torch.randint(CLASSES, (BATCH,), generator=source),
        "class_labels": torch.randint(CLASSES, (BATCH,), generator=source),
        "noise": draw_latents(source),
    }


def draw_noisy_tokens(source: Generator) -> Batch:
    """Latents as a sequence, with the place of each in an image."""
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    places = torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], dim=1)
    return {
        "hidden_states": torch.randn(BATCH, 16, 4, generator=source),
        "encoder_hidden_states": torch.randn(BATCH, 8, WIDTH, generator=source),
        "pooled_projections": torch.randn(BATCH, WIDTH, generator=source),
        "timestep": torch.rand(BATCH, generator=source),
        "img_ids": places,
        "txt_ids": torch.zeros(8, 3),
        "noise": torch.randn(BATCH, 16, 4, generator=source),
    }


def draw_noisy_video(source: Generator) -> Batch:
    return {
        "hidden_states": torch.randn(BATCH, 2, 4, 8, 8, generator=source),
        "encoder_hidden_states": torch.randn(BATCH, 8, WIDTH, generator=source),
        "timestep": 1000 * torch.rand(BATCH, generator=source),
        "noise": torch.randn(BATCH, 2, 4, 8, 8, generator=source),
    }


def draw_series(source: Generator) -> Batch:
    return {
        "series": torch.randn(BATCH, SEQUENCE, WIDTH, generator=source),
        "next": torch.randn(BATCH, SEQUENCE, WIDTH, generator=source),
    }
