"""The trainers of transformers and TRL, as a script has them and with its two lines changed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.frameworks import data

Logged = list[tuple[float, float]]
"""Loss and gradient norm of each step, to the 4 decimals that are compared."""

ARGUMENTS: dict[str, Any] = dict(
    per_device_train_batch_size=2,
    max_steps=6,
    learning_rate=1e-3,
    weight_decay=0.1,
    max_grad_norm=0.5,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    seed=5,
)


def make(
    kind: str,
    folder: Path,
    offload: Mapping[str, Any] | None,
    *,
    lora: bool = False,
    arguments: Mapping[str, Any],
    **given: Any,
) -> Any:
    """Return a trainer.

    Args:
        kind: name of its class.
        offload: options of `offload`; None: the framework's own class.
    """
    from offloadtrain.integrations.hf import OffloadMixin

    owner = import_module("transformers" if kind == "Trainer" else "trl")  # trl takes seconds
    base = getattr(owner, kind)
    settings = getattr(owner, {"Trainer": "TrainingArguments"}.get(kind, f"{kind[:3]}Config"))
    named = {"output_dir": str(folder), "bf16": False, **ARGUMENTS, **arguments}
    given = {"model": data.model(), "args": settings(**named), **_data_of(kind), **given}
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0)
    elif kind == "DPOTrainer":
        given["ref_model"] = data.model()
    if offload is None:
        return base(**given)
    return type(f"Offload{kind}", (OffloadMixin, base), {})(**given, offload=offload)


def train(
    kind: str,
    folder: Path,
    offload: Mapping[str, Any] | None,
    *,
    resume: Path | None = None,
    **others: Any,
) -> Logged:
    trainer = make(kind, folder, offload, **others)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return logged(trainer)


def logged(trainer: Any) -> Logged:
    """Of a resumed run too: from the first step on, as the checkpoint has kept it."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(round(entry["loss"], 4), round(entry["grad_norm"], 4)) for entry in steps]


def _data_of(kind: str) -> dict[str, Any]:
    if kind == "Trainer":
        return {"train_dataset": data.Texts(masked=True)}
    from datasets import Dataset

    rows: Any = data.Texts().unpadded() if kind == "SFTTrainer" else data.preferences()
    return {"train_dataset": Dataset.from_list(rows), "processing_class": data.tokenizer()}
