"""The section [model] of a job that names a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offloadtrain.config import toml
from offloadtrain.config.hf_model import (
    HfModel,
    Lora,
    find_folder,
    identity_of,
    read_config,
    shape_of,
)
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig

HF_KEYS = ("hf", "init", "lora")
"""Keys of the section; those of the model's shape are config.json's."""


def read_hf(job: toml.Job, table: toml.Table) -> HfModel | None:
    """Return `model.hf` and what goes with it, as written."""
    for key in ("size", *toml.field_kinds(ModelShape)):
        if key not in table:
            continue
        job.problems.append(f"model.{key} is config.json's with model.hf: leave it out")
        del table[key]
    toml.report_unknown(job, table, HF_KEYS, "model")
    kinds = {key: kind for key, kind in toml.field_kinds(HfModel).items() if key in HF_KEYS}
    lora = table.pop("lora", None)
    values = toml.read_fields(job, kinds, table, "model")
    if lora is not None and not isinstance(lora, dict):
        job.problems.append(f"model.lora = {toml.shown(lora)} must be a table: {{r = 8}}")
    elif lora is not None:
        toml.report_unknown(job, lora, [*toml.field_kinds(Lora)], "model.lora")
        options = toml.read_fields(job, toml.field_kinds(Lora), lora, "model.lora")
        values["lora"] = Lora(**options)
        job.problems += [f"model.lora.{problem}" for problem in values["lora"].problems()]
    return None if job.problems else HfModel(**values)


def looked_at(
    job: toml.Job, hf: HfModel, config: toml.Table | None
) -> tuple[HfModel, ModelShape | None]:
    """Return the model with its identity, and its shape, by its config.json."""
    try:
        content = read_config(find_folder(hf.hf)) if config is None else config
        return replace(hf, identity=identity_of(content)), shape_of(content)
    except (OSError, ValueError) as error:
        job.problems.append(f"model.hf = {toml.shown(hf.hf)} {error}")
        return hf, None


def contradictions(hf: HfModel | None, offload: OffloadConfig) -> Iterator[str]:
    """Yield a sentence for each option that only models of transformers take."""
    if hf is None and offload.weights.keep_fp32 and offload.precision != "fp32":
        yield (
            f"offload.keep_fp32 = {toml.shown([*offload.weights.keep_fp32])} without model.hf: the "
            "shipped transformer computes in one dtype. Leave it out, or set "
            "offload.precision = 'fp32'"
        )
