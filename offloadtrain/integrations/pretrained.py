"""Loads Hugging Face folders into engines, and saves engines as Hugging Face folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from offloadtrain.boundary.model_folder import check_folder
from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.hf_model import read_config
from offloadtrain.engine import EMA, ModelError, OffloadOptimizer, offload, optimizer_of
from offloadtrain.hardware.host_memory import is_out_of_memory
from offloadtrain.integrations.adapters import (
    attach,
    base_model,
    is_peft,
    lora_config,
    reads_base,
    write_model,
)
from offloadtrain.integrations.deferred import CannotDeferError, DeferredWeights
from offloadtrain.integrations.export import Named, new_folder, write_tokenizer
from offloadtrain.optim import AnyRule
from offloadtrain.parallel.pipeline.stage_modules import is_stage
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.runtime.process_group import ALONE, RankError, Ranks

_log = logging.getLogger(__name__)

_OURS = {
    "dtype": "precision= says in what dtype the model computes",
    "torch_dtype": "precision= says in what dtype the model computes",
    "device_map": "device= and working= say where weights are",
    "quantization_config": "a quantized base is loaded by transformers and PEFT, then ot.offload",
    "gguf_file": "convert it to safetensors first",
    "state_dict": "load it into a model of your own, then ot.offload",
    "ignore_mismatched_sizes": "correct the configuration",
}
"""Unsupported arguments of transformers' `from_pretrained` → what to use instead."""

_sources: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
"""Model → folder from which it was loaded."""

_OF_CONFIG = "trust_remote_code revision token cache_dir local_files_only subfolder".split()
"""Arguments that determine which config.json is read."""


def from_pretrained(
    name_or_folder: str | Path,
    rule: AnyRule | None = None,
    *,
    auto_class: str | type | None = None,
    lora: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, OffloadOptimizer]:
    """Load a Hugging Face model directly into an engine; return the model and its optimizer.

    Weights are read from safetensors one module at a time: besides the engine's memory there is
    never a copy of the model. They equal those of transformers' own `from_pretrained`, and fp32
    files become fp32 master weights unchanged. The model is in eval mode, as transformers returns
    it: call `model.train()`.

    Args:
        name_or_folder: a folder with config.json and safetensors files, or a name on the Hub.
        rule: see `offload`.
        auto_class: a transformers class, or its name: "AutoModelForCausalLM",
            "AutoModelForSequenceClassification", … Default: the class in config.json.
        lora: keys of PEFT's `LoraConfig`: train adapters on a frozen base in the working dtype.
        trust_remote_code: run model code from the folder or the Hub.
        model_kwargs: further arguments of transformers' `from_pretrained`: attn_implementation,
            num_labels, revision, token, …
        options: as in `offload`. `params` may be a function of the model.

    Raises:
        ModelError: the checkpoint is quantized, pickled, damaged, of another shape, or of another
            model.
    """
    extra = dict(model_kwargs or {})
    if wrong := [key for key in _OURS if key in extra]:
        raise ValueError(f"model_kwargs has {wrong[0]}: {_OURS[wrong[0]]}")
    from transformers.utils import cached_file

    keywords = extra | {"trust_remote_code": trust_remote_code}
    name, adapters = str(name_or_folder), None if lora is None else lora_config(lora)
    with reading(name):
        load = _load_of(name, auto_class, keywords)
        if adapters is None or not reads_base(adapters):
            model, weights = _deferred(name, load, DeferredWeights())
        else:
            model, weights = load(), None
    # Folder of the configuration; for a name, the one in the Hub's cache.
    of_cache = {key: value for key, value in keywords.items() if key in _OF_CONFIG[1:]}
    _sources[model] = Path(cached_file(name, "config.json", **of_cache)).parent
    if adapters is not None:
        model = attach(model, adapters)
    if callable(groups := options.get("params")):
        options["params"] = groups(model)
    if weights is None:
        return model, offload(model, rule, **options)
    optimizer = offload(model, rule, param_init_fn=weights.fill, **options)
    weights.close()
    return model, optimizer


def deferred_model(
    folder: Path, auto_class: str | type | None = None
) -> tuple[Any, DeferredWeights | None]:
    """Return (model on the meta device, the object whose `fill` reads its weights on demand), or
    (model with its weights, None) if the model had to be loaded completely. Raises ModelError as
    `from_pretrained`."""
    keywords = {"trust_remote_code": False, "local_files_only": True}
    with reading(folder):
        load = _load_of(str(folder), auto_class, keywords)
        return _deferred(str(folder), load, DeferredWeights())


@contextmanager
def reading(folder: str | Path) -> Iterator[None]:
    """Check a folder, and turn errors that transformers raises inside into a ModelError that names
    it: untrusted files make transformers raise errors of any class.

    Args:
        folder: a folder, or a name on the Hub, which is not checked.

    Raises:
        UnsafeFileError: see `check_folder`.
        ModelError: has the class and the message of the original error, which is its cause.
    """
    if os.path.isdir(folder):
        check_folder(folder)
    try:
        yield
    except OffloadTrainError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:500]
        raise ModelError(
            f"'{folder}' cannot be loaded by transformers: {type(error).__name__}: {reason}"
        ) from error


def _deferred(
    name: str, load: Callable[..., Any], weights: DeferredWeights
) -> tuple[Any, DeferredWeights | None]:
    """Load without weights; if that is impossible, load completely, and warn of the cost."""
    try:
        return weights.plan(load), weights
    except CannotDeferError as error:
        _log.warning(
            "'%s' cannot be loaded one module at a time (%s): transformers loads it whole, and "
            "weights that it converts are in host memory twice until the engine has its own",
            name,
            error,
        )
        return load(dtype=weights.dtype), None


def save_pretrained(
    source: OffloadOptimizer | EMA | nn.Module,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    merge: bool = False,
) -> None:
    """Write a folder for `AutoModel….from_pretrained`, with weights from the masters. For a PEFT
    model, write only its adapters, for `PeftModel.from_pretrained`.

    Written next to `folder` and renamed at the end, so that the folder is complete or missing.
    Holds one shard of host memory. All ranks must call it; rank 0 writes. In update mode
    "delayed", the weights include the pending update.

    Args:
        source: the optimizer, or its model; a model without one is written unchanged. An `EMA`:
            its averages are written instead of the masters.
        folder: new or empty.
        dtype: dtype of the weights: "bf16", "fp16" or "fp32"; default "bf16", for adapters "fp32".
            Integers, buffers, and weights that the model stores in fp32 are not cast.
        max_shard_size: bytes, or "5GB".
        tokenizer: tokenizer or processor to save as well. Default: the tokenizer files in the
            folder from which the model was loaded.
        merge: for a PEFT model, write its base with the active adapters merged in, computed in fp32
            and then rounded.

    Raises:
        FileExistsError: `folder` is not empty.
        ValueError: the dtype is unknown.
        ModelError: the model is not of transformers, or adapters cannot be merged.
    """
    average, source = (source, source.optimizer) if isinstance(source, EMA) else (None, source)
    optimizer = source if isinstance(source, OffloadOptimizer) else optimizer_of(source)
    model: Any = source.model if isinstance(source, OffloadOptimizer) else source
    base = base_model(model)
    if not hasattr(base, "save_pretrained"):
        raise ModelError(
            f"{type(base).__name__} is no model of transformers: save dict(master_weights()) with "
            "safetensors.torch.save_file"
        )
    if is_stage(base):
        raise ModelError(
            f"this {type(base).__name__} holds a stage of the model: put master_weights() of all "
            "stages together, or train as a job ([ranks] pipeline) and use offloadtrain export"
        )
    only_adapters = is_peft(model) and not merge
    dtype = dtype or ("fp32" if only_adapters else "bf16")
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype = {dtype!r} is not one of {', '.join(map(repr, PRECISIONS))}")
    as_dtype, buffers = PRECISIONS[dtype], dict(base.named_buffers())
    weights: Named = ((name, param.detach().cpu()) for name, param in model.named_parameters())
    weights = weights if optimizer is None else optimizer.master_weights()
    weights = weights if average is None else average.weights()
    origin = _sources.get(base) or Path(getattr(base, "name_or_path", "") or os.devnull)

    def write() -> None:
        with new_folder(Path(folder)) as temporary:
            write_model(
                model,
                temporary,
                weights,
                buffers,
                as_dtype,
                merge=merge,
                max_shard_size=max_shard_size,
            )
            write_tokenizer(origin if origin.is_dir() else None, temporary, tokenizer)

    _on_first_rank(ALONE if optimizer is None else optimizer.ranks, write, weights)


def _on_first_rank(ranks: Ranks, write: Callable[[], None], weights: Named) -> None:
    """Call `write` on rank 0, while other ranks take part in the collectives of `weights`.

    Raises:
        RankError: on other ranks, if rank 0 failed.
    """
    error: Exception | None = None
    try:
        if ranks.rank == 0:
            write()
    except Exception as caught:
        error = caught
    # Consume all weights, also after an error: the other ranks wait in their collectives.
    for _ in weights:
        pass
    failure = ranks.broadcast_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failure is not None:
        raise RankError(f"rank 0 could not save: {failure}")


def _load_of(
    name: str, auto_class: str | type | None, keywords: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the loader of the model: `from_pretrained` of its class with these keywords.

    Raises:
        ModelError: the checkpoint cannot be trained or read.
    """
    import transformers

    _check_files(name, keywords)
    of_config = {k: v for k, v in keywords.items() if k in _OF_CONFIG}
    config = transformers.AutoConfig.from_pretrained(name, **of_config)
    refuse_quantized(config, name)
    if isinstance(auto_class, str):
        auto_class = getattr(transformers, auto_class)
    loader: Any = auto_class or _named_class(config, name)
    return partial(loader.from_pretrained, name, use_safetensors=True, **keywords)


def refuse_quantized(config: Any, name: str) -> None:
    """Raise ModelError if the configuration is of a quantized model."""
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ModelError(
            f"'{name}' is quantized ({method}): its weights have no gradients. Load an unquantized "
            "checkpoint; or train adapters: load it with transformers, wrap it with PEFT, and "
            "ot.offload the result"
        )


def _check_files(name: str, keywords: Mapping[str, Any]) -> None:
    """Check the files of a folder; a name on the Hub is not checked.

    Raises:
        ModelError: the folder does not exist, or contains no model that can be streamed.
    """
    folder = Path(name) / str(keywords.get("subfolder", ""))
    if not Path(name).is_dir():
        # A name on the Hub is NAME or OWNER/NAME.
        if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelError(
                f"'{name}': there is no such folder, and no name on the Hub is like it"
            )
        return
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"'{folder}' holds PEFT adapters: load their base model with transformers, then "
            "PeftModel.from_pretrained(base, folder, is_trainable=True), and ot.offload the result"
        )
    if not (folder / "config.json").exists():
        # A repository may hold several models.
        inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
        where = f"; these folders in it have: {', '.join(inner)}" if inner else ""
        where = where or ": it is no folder of a model of transformers"
        raise ModelError(f"'{folder}' has no config.json{where}")
    read_config(folder, requested=keywords)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index*.json")):
        return
    if pickled := sorted(path.name for path in folder.glob("*.bin")):
        raise ModelError(
            f"'{folder}' has its weights in pickles ({pickled[0]}), which can run code when read, "
            "and must be read whole. Write safetensors once: "
            "transformers.AutoModel.from_pretrained(folder).save_pretrained(new_folder), with the "
            "model's own class instead of AutoModel"
        )
    why = ": its weights were not downloaded"
    if any(folder.glob("*.gguf")):
        why = ", only GGUF: load it with transformers (gguf_file=…), which widens it, then "
        why += "ot.offload"
    raise ModelError(f"'{folder}' has no *.safetensors{why}")


def _named_class(config: Any, name: str) -> Any:
    """Return the class in config.json, or the auto class of its remote code."""
    import transformers

    for architecture in getattr(config, "architectures", None) or ():
        for auto, reference in (getattr(config, "auto_map", None) or {}).items():
            if reference.rpartition(".")[2] == architecture:
                return getattr(transformers, auto)
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    raise ModelError(
        f"the configuration of '{name}' names no class of transformers: pass auto_class, such as "
        "'AutoModelForCausalLM'"
    )
