"""A plain script of a trainer, and the two lines that offload its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks import data, trainers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # advice of the frameworks, and names that they drop
]

PLAIN = """
from {owner} import {settings}, {kind}

args = {settings}(output_dir=folder, bf16=False, **arguments)
trainer = {kind}(model=model, args=args, **given)
trainer.train()
"""
TWO_LINES = """from offloadtrain.integrations.hf import OffloadMixin
class {kind}(OffloadMixin, {kind}): offload = {{"working": "host"}}
"""
KINDS = {
    "Trainer": ("transformers", "TrainingArguments"),
    "SFTTrainer": ("trl", "SFTConfig"),
    "DPOTrainer": ("trl", "DPOConfig"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_lines_offload_a_script(tmp_path: Path, kind: str) -> None:
    owner, settings = KINDS[kind]
    plain = PLAIN.format(kind=kind, owner=owner, settings=settings)
    head, blank, body = plain.partition("\n\n")
    offloaded = head + "\n" + TWO_LINES.format(kind=kind) + blank + body
    trainer = run(offloaded, kind, tmp_path)
    assert type(trainer.optimizer.optimizer).__name__ == "OffloadOptimizer"
    assert trainers.logged(trainer) == trainers.logged(run(plain, kind, tmp_path))


def run(script: str, kind: str, folder: Path) -> Any:
    """Execute a script; returns its trainer."""
    names: dict[str, Any] = {
        "arguments": trainers.ARGUMENTS | {"max_steps": 2},
        "folder": str(folder),
        "given": trainers._data_of(kind),
        "model": data.model(),
    }
    if kind == "DPOTrainer":
        names["given"]["ref_model"] = data.model()
    exec(script, names)
    return names["trainer"]
