"""`model.hf` of a job: describes the model, and builds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadtrain.config.errors import ConfigError, PipelineError
from offloadtrain.config.hf_model import (
    HfModel,
    Lora,
    config_of_name,
    find_folder,
    published_models,
    published_name,
)
from offloadtrain.config.model_shape import MOST_PARAMS
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.engine import ModelError, OffloadOptimizer, offload
from offloadtrain.integrations.adapters import attach, lora_config
from offloadtrain.integrations.causal_lm import (
    CausalLm,
    CausalLmError,
    attend_within_documents,
    check_varlen,
    freeze_other_modalities,
    transformers_package,
)
from offloadtrain.integrations.chunked_loss import chunk_loss
from offloadtrain.integrations.deferred import DeferredWeights
from offloadtrain.integrations.framework_support import liger_problem
from offloadtrain.integrations.pretrained import deferred_model, reading
from offloadtrain.model.transformer import LossTerms
from offloadtrain.optim import AnyRule
from offloadtrain.parallel.mesh import DeviceMesh, Mesh
from offloadtrain.parallel.pipeline.decoder_probe import check_stages
from offloadtrain.parallel.pipeline.stage_modules import divide as divide_layers
from offloadtrain.parallel.tensor.transformers_plan import check_plan, divide, divided_dims
from offloadtrain.plan.layout import parts_of_module

AUTO_CLASS = "AutoModelForCausalLM"
RANKS = RanksConfig()

Groups = Callable[[nn.Module], list[dict[str, Any]]]


def described(hf: HfModel, ranks: RanksConfig = RANKS, layers: int = 0) -> HfModel:
    """Return the model with the sizes of its parts, determined on the meta device.

    Args:
        ranks: how the ranks divide the model.
        layers: number of layers according to its config.json.

    Raises:
        ConfigError: transformers is not installed, or has no causal language model of this kind, or
            the model cannot be divided this way.
    """
    model = described_model(hf)
    dims: dict[str, int] = {}
    if ranks.tensor > 1:
        check_plan(model, ranks.tensor)
        dims = divided_dims(model, ranks.tensor)
    with_parts = replace(hf, parts=parts_of_module(model, dims))
    if ranks.stages > 1:
        _check_stages(model, with_parts, ranks.stages, layers)
    return with_parts


def _check_stages(model: Any, hf: HfModel, stages: int, layers: int) -> None:
    setting = f"ranks.pipeline with model.hf = {hf.hf!r}"
    try:
        check_stages(model, divide_layers(model, stages))
    except PipelineError as error:
        raise ConfigError(f"{setting}: {error}") from None
    if (listed := sum(part.repeated for part in hf.parts or ())) != layers:
        raise ConfigError(f"{setting}: its config.json has {layers} layers, and its list {listed}")


def described_model(hf: HfModel) -> Any:
    """Return the model on the meta device."""
    return empty_model(_config(hf.hf), hf.lora)


def _config(name: str) -> Any:
    """Return the configuration of a model for training, without quantization."""
    transformers = transformers_package("model.hf, to count its parameters too,")
    with reading(Path(name)):
        values = config_of_name(name)
        if published_models().get(published_name(name)) is values:
            return config_of(values)
        config = transformers.AutoConfig.from_pretrained(
            find_folder(name), trust_remote_code=False, local_files_only=True
        )
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def config_of(values: Mapping[str, Any]) -> Any:
    """Return the configuration object for the values of a config.json."""
    transformers = transformers_package("a model of transformers")
    return transformers.CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))


def empty_model(config: Any, lora: Lora | None) -> Any:
    """Return the model of a configuration on the meta device, with its adapters. Changes no random
    state."""
    import transformers
    from transformers.initialization import no_init_weights

    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"model.hf: transformers has no causal language model of type {config.model_type}. "
            "ot.offload trains any model in a loop of your own, and ot.plan_model plans it"
        )
    with reading(config.name_or_path), torch.device("meta"), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # `no_init_weights` skips it
    if (count := sum(param.numel() for param in model.parameters())) > MOST_PARAMS:
        raise ConfigError(
            f"model.hf: its config.json describes a model of {count:,} parameters, and at most "
            f"{MOST_PARAMS:,} are planned"
        )
    CausalLm.of(model)
    if lora is not None:
        with torch.random.fork_rng(devices=[]):  # PEFT draws them on the host
            model = _with_adapters(model, lora)
    return freeze_other_modalities(model)


def unset_model(config: Any, lora: Lora | None, dtype: torch.dtype) -> Any:
    """Return the model of a configuration on the host. Weights have this dtype and are
    uninitialized; buffers have values."""
    import transformers
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # else a tied head, which no checkpoint has, would stay uninitialized
    if lora is not None:
        model = _with_adapters(model, lora)
    for param in model.parameters():
        param.data = param.data.to(dtype)  # not `model.to`, which would cast buffers
    return model


def _with_adapters(model: Any, lora: Lora) -> Any:
    """Attach adapters; raise ConfigError if PEFT finds no such layers, or is not installed."""
    keys: dict[str, Any] = {"r": lora.r, "alpha": lora.alpha, "dropout": lora.dropout}
    if lora.target_modules:
        keys["target_modules"] = list(lora.target_modules)
    try:
        return attach(model, lora_config(keys | {"task_type": "CAUSAL_LM"}))
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model.lora: {error}") from None


def build(
    hf: HfModel,
    rule: AnyRule,
    groups: Groups,
    config: OffloadConfig,
    *,
    device: torch.device,
    seed: int,
    terms: LossTerms | None = None,
    varlen: bool = False,
    mesh: Mesh | None = None,
) -> tuple[CausalLm, OffloadOptimizer]:
    """Return the model in training mode, with its optimizer.

    Weights of a folder are streamed into the engine; random ones are drawn by transformers, in fp32
    on the host, before the engine copies them.

    Args:
        seed: seed of random weights and of adapters.
        terms: terms of a chunked loss; None: full logits.
        varlen: attend within documents by variable-length attention.
        mesh: as in `offload`.

    Raises:
        ConfigError, CausalLmError: the model does not support an option; raised before its weights
            are read.
    """
    lm, weights = whole_model(hf, seed=seed, terms=terms)
    model = lm.module
    if mesh is not None and mesh.tensor is not None:
        divide_matrices(model, mesh.tensor, weights)
    # A job's kernels are attached before the engine replaces forwards.
    if hf.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, None)
    if varlen:
        attend_within_documents(model)
    optimizer = offload(
        model,
        rule,
        params=groups(freeze_other_modalities(model)),
        device=device,
        config=config,
        mesh=mesh,
        param_init_fn=None if weights is None else weights.fill,
    )
    if weights is not None:
        weights.close()
    if terms is not None:
        chunk_loss(model, **asdict(terms))
    return lm, optimizer


def whole_model(
    hf: HfModel, *, seed: int, terms: LossTerms | None
) -> tuple[CausalLm, DeferredWeights | None]:
    """Return (complete model in training mode, with its adapters; object that fills modules with
    weights on demand, None if the model has its weights). The caller must apply `chunk_loss`, which
    needs the head: not every rank keeps it. The arguments are those of `build`.

    Raises:
        ConfigError, CausalLmError: as in `build`.
    """
    import transformers

    weights: DeferredWeights | None = None
    with _drawn_by(seed):
        if hf.init == "weights":
            model, weights = deferred_model(hf.folder, AUTO_CLASS)
        else:
            model = transformers.AutoModelForCausalLM.from_config(
                _config(hf.hf), dtype=torch.float32
            )
        if hf.lora is not None:
            model = _with_adapters(model, hf.lora)
    chunked = terms is not None or hf.use_liger_kernel
    return CausalLm.of(model.train(), chunked=chunked), weights


@contextmanager
def _drawn_by(seed: int) -> Iterator[None]:
    """Draw weights on the host with this seed, equal on all ranks, and restore the rank's
    generator, which dropout uses."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # only the host draws
        yield


def divide_matrices(model: Any, mesh: DeviceMesh, weights: DeferredWeights | None) -> None:
    """Turn the matrices of `whole_model` into DTensors, of which this rank keeps its part.

    Args:
        mesh: one axis, the tensor parallel ranks.
        weights: fills the model; None if it has its weights.
    """
    divide(model, mesh)
    if weights is not None:
        weights.follow()


def check_liger(hf: HfModel, device: torch.device) -> None:
    """Raise ConfigError if Liger's kernels are requested but cannot run here or for this
    model type (Liger itself would only log that)."""
    if not hf.use_liger_kernel:
        return
    why, model_type = liger_problem(device), config_of_name(hf.hf).get("model_type")
    if not why:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            why = f"it has no kernels for models of type {model_type}"
    if why:
        raise ConfigError(f"model.use_liger_kernel = true: {why}; leave it out")


def check_can(hf: HfModel, *, chunked: bool, isolated: bool, varlen: int = 0) -> None:
    """Raise ConfigError if a model does not support a requested feature: chunked loss, attention
    that does not cross document ends, or variable-length attention.

    Args:
        varlen: tokens per sequence for variable-length attention; 0: not requested.
    """
    if not (chunked or isolated):
        return
    empty = empty_model(_config(hf.hf), None)
    try:
        if isolated:
            CausalLm.of(empty).check_isolates()
        if varlen:
            check_varlen(empty_model(_config(hf.hf), None), varlen)
    except CausalLmError as error:
        raise ConfigError(str(error)) from None
    try:
        if chunked:
            chunk_loss(empty)
    except ModelError as error:
        raise ConfigError(f"train.chunked_loss = true: {error}") from None
