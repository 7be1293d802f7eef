"""`model.hf` of a job: a model of transformers, as described by the files of its folder.

Standard library only: config.json is read as JSON. The parameters of the model need the package
transformers, see `integrations/hf_job.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from offloadtrain.boundary.model_folder import inside
from offloadtrain.boundary.safe_open import read_json, read_text
from offloadtrain.config import toml
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.model_shape import MOST_LAYERS, MOST_TOKENS, ModelShape
from offloadtrain.config.option import POSITIVE, at_least, out_of_range, ranged
from offloadtrain.config.ranks_options import Stage

_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of config.json that do not describe the model."""
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """`model.lora`: adapters in addition to a frozen base.

    Attributes:
        r: rank of the adapters.
        alpha: the adapters' product is scaled by alpha / r.
        dropout: dropout probability before an adapter.
        target_modules: names of linear layers; empty: the layers that PEFT chooses for the class.
    """

    r: int = ranged(8, at_least(1))
    alpha: float = ranged(16.0, POSITIVE)
    dropout: float = ranged(0.0, ((lambda value: 0.0 <= value < 1.0), "in [0, 1)"))
    target_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParamShape:
    """A parameter with its qualified name.

    Attributes:
        hidden: True for a matrix of the layers in a list, without embeddings.
        fp32: the model stores the parameter in fp32 at every precision.
        expert_parts: number of ranks that each have a different tensor of this shape; ranks with
            the same tensor share its state.
        divided: the dimension that tensor parallel divides; None: each part has the whole tensor.
    """

    name: str
    sizes: tuple[int, ...]
    trained: bool = True
    hidden: bool = False
    fp32: bool = False
    expert_parts: int = 1
    divided: int | None = None

    def of_part(self, parts: int) -> ParamShape:
        """Return the tensor of one of `parts` parts."""
        if self.divided is None:
            return self
        sizes = list(self.sizes)
        sizes[self.divided] //= parts
        return replace(self, sizes=tuple(sizes))


@dataclass(frozen=True, slots=True)
class PartShape:
    """The parameters of a module that become a block; see `engine/partition.py`."""

    name: str
    params: tuple[ParamShape, ...]
    repeated: bool = False
    leaf: bool = False
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """A model of transformers.

    Attributes:
        hf: a folder, or the name of a model in the cache of Hugging Face; for any other module in a
            plan, its class.
        init: "weights": fine-tune the weights of the folder; "random": pre-train from its
            config.json.
        lora: train adapters next to the frozen model, not the model.
        use_liger_kernel: train with Liger's fused kernels and its fused loss, on a GPU.
        quantized: the quantization that config.json states; empty: none.
        identity: hash of the description of the model in config.json.
        parts: every parameter; None before `integrations/hf_job.py` has read them.
        tensors_before: for a stage of a pipeline, number of parameter tensors of earlier stages.
    """

    hf: str
    init: Literal["weights", "random"] = "weights"
    lora: Lora | None = None
    use_liger_kernel: bool = False
    quantized: str = ""
    identity: str = ""
    parts: tuple[PartShape, ...] | None = None
    tensors_before: int = 0

    @property
    def folder(self) -> Path:
        """The folder of the model. Raises FileNotFoundError if `hf` is neither a folder nor in the
        cache."""
        return find_folder(self.hf)

    @property
    def unquantized(self) -> str:
        """A sentence on how to make the 16-bit weights from which training starts, as quantized
        weights have no gradients; "" if the weights are not quantized."""
        if not self.quantized:
            return ""
        method = self.quantized.partition(",")[0]
        return (
            f"{self.hf} is quantized ({self.quantized}), and training starts from 16-bit weights: "
            f"{_UNQUANTIZED.get(method, 'use the model that it was quantized from')}"
        )

    def of_stage(self, stage: Stage) -> HfModel:
        """Return the part of the model that is a stage of a pipeline, in the same way as
        `parallel.pipeline.stage_modules.divide` divides the module."""
        if self.parts is None:
            return self
        layers = [number for number, part in enumerate(self.parts) if part.repeated]
        bounds = [0, *layers[1:], len(self.parts)]
        first, end = bounds[stage.first_layer], bounds[stage.first_layer + stage.layers]
        before = sum(len(part.params) for part in self.parts[:first])
        return replace(self, parts=self.parts[first:end], tensors_before=before)


_LOADED = 'model = AutoModelForCausalLM.from_pretrained(NAME, dtype="bfloat16"'
_UNQUANTIZED = {
    "mxfp4": f"{_LOADED}, quantization_config=Mxfp4Config(dequantize=True))",
    "fp8": f"{_LOADED}, quantization_config=FineGrainedFP8Config(dequantize=True))",
    "bitsandbytes": f"{_LOADED}).dequantize()",
}
"""Maps a method of quantization to the call that makes 16-bit weights; other methods have no such
call."""


PUBLISHED_MODELS = Path(__file__).with_name("published_models.json")


@cache
def published_models() -> dict[str, dict[str, Any]]:
    """Return the parts of config.json that plans need, for published models, by their names on the
    Hub."""
    models = json.loads(PUBLISHED_MODELS.read_text(encoding="utf-8"))["models"]
    return {name: entry["config"] for name, entry in models.items()}


def published_name(name: str) -> str:
    """Return the published model with this name, with or without its organization and a suffix such
    as -Instruct or -it; empty: none."""

    def bare(known: str) -> str:
        last = known.rpartition("/")[2].lower().removeprefix("meta-")
        return re.sub(r"-(instruct|it|pt|base)(?=-|$)", "", last)

    return {bare(known): known for known in published_models()}.get(bare(name), "")


def config_of_name(name: str) -> dict[str, Any]:
    """Return config.json of a folder or of a name in the Hub's cache. For a published model that is
    not there, return the known part of its config.json.

    Raises:
        FileNotFoundError: if there is none. Also raises the errors of `read_config`.
    """
    try:
        folder = find_folder(name)
    except FileNotFoundError:
        if not (known := published_name(name)):
            raise
        return published_models()[known]
    return read_config(folder)


def find_folder(name: str) -> Path:
    """Return the folder of a model: `name` itself, or the folder of its main revision in the Hub's
    cache.

    Raises:
        FileNotFoundError: if neither has a config.json.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    repository = cache / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    if main.is_file():
        revision = read_text(main, max_bytes=_MOST_BYTES, follow_link=True).strip()
        snapshot = repository / "snapshots" / revision
        if (snapshot / "config.json").is_file():
            return snapshot
    raise FileNotFoundError(
        f"no config.json, neither as a folder nor in {cache}; download a model by its name "
        "first: hf download NAME"
    )


def require_folder(hf: HfModel | None) -> None:
    """Raise ConfigError for a published model if only its sizes are known on this machine."""
    if hf is None:
        return
    try:
        find_folder(hf.hf)
    except FileNotFoundError as error:
        raise ConfigError(f"model.hf = {toml.shown(hf.hf)}: {error}") from None


def read_config(folder: Path, *, requested: Container[str] = ()) -> dict[str, Any]:
    """Return config.json of a folder.

    Args:
        requested: keys for which the caller has its own value, for example attn_implementation.

    Raises:
        UnsafeFileError, OSError: if the file cannot be read, leads out of the folder, or is not
            JSON.
        ValueError: if it is not a JSON object, makes transformers load code, or has an impossible
            shape.
    """
    path = folder / "config.json"
    content = read_json(inside(path), max_bytes=_MOST_BYTES)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    _check_values(path, content, requested)
    return content


_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""Allowed values of these keys, for which transformers loads no package and no code."""

_MOST = {
    r"(layer|block|depth)s?$": MOST_LAYERS,
    r"(expert|head|label)s?$": 1 << 17,
    r"vocab_size$": MOST_TOKENS,
    r"(?<!vocab_)(size|dim|inner|embd|d_model|d_ff)$": 1 << 20,
}
"""Maps a pattern of keys to the largest value that a model may have."""
_AT_LEAST_1 = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


def _check_values(path: Path, table: Mapping[str, Any], requested: Container[str]) -> None:
    for key, value in table.items():
        if isinstance(value, Mapping):
            _check_values(path, value, requested)
        name = key.removeprefix("_").removesuffix("_internal")
        allowed = () if name in requested else _IMPLEMENTATIONS.get(name, ())
        for chosen in value.values() if isinstance(value, Mapping) else (value,):
            if allowed and chosen is not None and chosen not in allowed:
                raise ValueError(
                    f"{path}: {key} = {str(chosen)[:80]!r} makes transformers load other code. "
                    f"Remove it, or set it to one of {', '.join(allowed)}"
                )
        if key == "return_dict" and value is not True:
            raise ValueError(f"{path}: {key} = {value!r}: without it, outputs have no names")
        if key in _AT_LEAST_1 and isinstance(value, int) and value < 1:
            raise ValueError(f"{path}: {key} = {value} must be at least 1")
        for pattern, most in _MOST.items():
            if isinstance(value, int) and value > most and re.search(pattern, key):
                raise ValueError(f"{path}: {key} = {value}, and no model has more than {most}")


def identity_of(config: Mapping[str, Any]) -> str:
    """Return a hash of the description of the model in config.json."""
    stable = {key: value for key, value in config.items() if key not in _VOLATILE}
    return sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()


_KEYS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "num_kv_heads": ("num_key_value_heads",),
    "d_ff": ("intermediate_size", "n_inner", "ffn_dim"),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape with which a plan estimates activations and arithmetic: the shape of the
    project's transformer with the numbers of this config.json. It never counts parameters.

    Raises:
        ValueError: with the name of the number that config.json lacks.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) and nested else config
    values: dict[str, Any] = {}
    for key, names in _KEYS.items():
        value = next((text[name] for name in names if text.get(name)), None)
        if type(value) is not int or value < 1:
            raise ValueError(
                f"its config.json has no {' or '.join(names)}: memory and time of a step cannot be "
                "planned for such a model"
            )
        values[key] = value
    for key, names in _OPTIONAL.items():
        value = next((text[name] for name in names if type(text.get(name)) is int), None)
        if value is not None and value > 0:
            values[key] = value
    gpt2, dropout = text.get("n_embd") is not None, text.get("resid_pdrop")
    return ModelShape(
        **({"max_seq_len": 1 << 20} | values),
        positions="learned" if gpt2 else "rotary",
        norm="layernorm" if gpt2 else "rmsnorm",
        mlp="gelu" if gpt2 else "swiglu",
        bias=gpt2,
        tie_embeddings=bool(text.get("tie_word_embeddings", gpt2)),
        dropout=dropout if isinstance(dropout, float) else 0.0,
    )


HF_KEYS = ("hf", "init", "lora", "use_liger_kernel")
"""Keys of the section. The keys of the model's shape are in config.json."""


def read_hf(job: toml.Job, table: toml.Table) -> HfModel | None:
    """Return `model.hf` and its related keys, as written."""
    for key in ("size", *toml.field_kinds(ModelShape)):
        if key not in table:
            continue
        job.problems.append(f"model.{key} is config.json's with model.hf: leave it out")
        del table[key]
    lora = table.pop("lora", None)
    kinds = {key: kind for key, kind in toml.field_kinds(HfModel).items() if key in HF_KEYS}
    values = toml.read_table(job, kinds, table, "model")
    if lora is not None and not isinstance(lora, dict):
        job.problems.append(f"model.lora = {toml.shown(lora)} must be a table: {{r = 8}}")
    elif lora is not None:
        values["lora"] = Lora(**toml.read_table(job, toml.field_kinds(Lora), lora, "model.lora"))
        job.problems += out_of_range(values["lora"], "model.lora.")
    return None if job.problems else HfModel(**values)


def _quantized(entry: object) -> str:
    """Return the method of quantization and its bits, as config.json states them."""
    if entry is None:
        return ""
    values = entry if isinstance(entry, Mapping) else {"quant_method": entry}
    bits = values.get("bits") or (values.get("load_in_4bit") and 4)
    method = toml.shown(values.get("quant_method"))[:40].strip("'\"")
    return f"{method}, {bits} bits" if type(bits) is int else method


def with_config_json(
    job: toml.Job, hf: HfModel, config: toml.Table | None
) -> tuple[HfModel, ModelShape | None]:
    """Return the model with its identity, and the shape, both from config.json."""
    try:
        content = config_of_name(hf.hf) if config is None else config
        quantized = _quantized(content.get("quantization_config"))
        return replace(hf, identity=identity_of(content), quantized=quantized), shape_of(content)
    except (OSError, ValueError) as error:
        job.problems.append(f"model.hf = {toml.shown(hf.hf)}: {error}")
        return hf, None
