"""TRL's SFTTrainer with its defaults, gradient checkpointing among them, over streamed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.architectures.models import ARCHITECTURES
from benchmarks.architectures.training import build

pytestmark = [  # names that TRL and PEFT use of transformers
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.mark.slow
def test_sft_with_its_defaults_trains_streamed(tmp_path: Path) -> None:
    from tests.integrations.sft import STEPS, fine_tune

    model = build(ARCHITECTURES["llama"])
    losses, watch = fine_tune(model, tmp_path, {"working": "host"})
    assert watch.checkpointed == [True] * STEPS
    assert watch.skipped == [False] * STEPS
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    resident = build(ARCHITECTURES["llama"])
    kept, seen = fine_tune(resident, tmp_path, {}, gradient_checkpointing=False)
    assert seen.checkpointed == [False] * STEPS
    assert (losses, watch.norms) == (kept, seen.norms)


@pytest.mark.slow
def test_lora_over_frozen_streamed_weights(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from tests.integrations.sft import STEPS, fine_tune

    torch.manual_seed(0)
    adapted: Any = get_peft_model(
        build(ARCHITECTURES["llama"]),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian"),
    )
    losses, watch = fine_tune(adapted, tmp_path, {"working": "host"})
    assert watch.checkpointed == [True] * STEPS
    assert watch.skipped == [False] * STEPS
    assert losses[-1] < losses[0]
