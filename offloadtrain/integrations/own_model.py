"""Maps the shipped transformer to a transformers class with its shape, and renames its weights.

    rotary, RMSNorm, SwiGLU        Llama; with two or more experts per token Mixtral
    rotary, RMSNorm, GELU          Arcee
    rotary, LayerNorm, SwiGLU      StableLM, without biases in linear layers
    rotary, LayerNorm, GELU        Starcoder2
    learned, LayerNorm, GELU       GPT-2, without grouped heads

A bias that the class has and the shape lacks is written as zeros. Other shapes have no class.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offloadtrain.config.errors import InputError, broken
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.integrations.export import Named

_GELU = "gelu_pytorch_tanh"

_CLASSES = {
    ("rotary", "rmsnorm", "swiglu"): "Llama",
    ("rotary", "rmsnorm", "gelu"): "Arcee",
    ("rotary", "layernorm", "swiglu"): "StableLm",
    ("rotary", "layernorm", "gelu"): "Starcoder2",
    ("learned", "layernorm", "gelu"): "GPT2",
}

_MIXTRAL_EXPERTS = {"up": "gate_up_proj", "down": "down_proj"}

_PARTS = {
    "mlp.router": "mlp.gate",
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.down": "mlp.down_proj",
}
"""Modules of a block with a single counterpart in Llama-like classes."""

_GPT2_PARTS = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
_GPT2_OUTSIDE = {
    "embedding.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}


class NoClassError(InputError):
    """No transformers class has the shape of the model."""


def class_name(shape: ModelShape) -> str:
    """Return the family name of the transformers classes with this shape.

    Raises:
        NoClassError: no class has it; the message names the unsupported part.
    """
    parts = f"{shape.positions} positions with {shape.norm} and {shape.mlp}"
    name = _CLASSES.get((shape.positions, shape.norm, shape.mlp))
    is_mixtral = name == "Llama" and shape.experts_per_token > 1 and not shape.bias
    reasons = broken(
        (
            not shape.is_causal,
            'no class of transformers is an encoder as model.objective = "mlm" trains: theirs '
            "normalise behind each branch or have other parts. offloadtrain convert RUN OUT "
            "--to torch writes the weights of a run under adamw or adam by their own names",
        ),
        (
            shape.num_experts and not is_mixtral,
            f"no class of transformers has {parts}{' and biases' if shape.bias else ''} and "
            f"experts with experts_per_token = {shape.experts_per_token}: Mixtral has rotary "
            "positions, rmsnorm and swiglu without biases, and divides the probabilities of a "
            "token's experts by their sum, which trains no router of one expert",
        ),
        (name is None, f"no class of transformers has {parts}"),
        (
            name == "StableLm" and shape.bias,
            f"no class of transformers has {parts} and biases in all linear layers",
        ),
        (
            name == "GPT2" and shape.kv_heads != shape.num_heads,
            f"no class of transformers has {parts} and grouped heads (num_kv_heads = "
            f"{shape.num_kv_heads})",
        ),
    )
    if name is None or reasons:
        raise NoClassError(reasons[0])
    return "Mixtral" if shape.num_experts else name


def empty_model(shape: ModelShape, *, end_of_document: int | None) -> Any:
    """Return the transformers model of this shape, on the meta device.

    Args:
        end_of_document: token at which generation stops.

    Raises:
        NoClassError: no class has this shape.
    """
    import transformers

    name = class_name(shape)
    special = dict.fromkeys(("bos_token_id", "pad_token_id")) | {"eos_token_id": end_of_document}
    keys = _gpt2_keys(shape) if name == "GPT2" else _llama_keys(shape, name)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_embeddings,
        **special,
        **keys,
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _llama_keys(shape: ModelShape, name: str) -> dict[str, Any]:
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    keys: dict[str, Any] = {
        "hidden_size": shape.d_model,
        "intermediate_size": shape.ff_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_seq_len,
        "attention_dropout": shape.dropout,
        "hidden_act": "silu" if shape.mlp == "swiglu" else _GELU,
    }
    if name == "StableLm":
        keys |= {"partial_rotary_factor": 1.0, "layer_norm_eps": shape.norm_eps}
        rotary["partial_rotary_factor"] = 1.0
    elif name == "Starcoder2":
        keys |= {"norm_epsilon": shape.norm_eps, "use_bias": shape.bias}
        keys |= {"residual_dropout": shape.dropout, "embedding_dropout": shape.dropout}
    else:
        keys |= {"rms_norm_eps": shape.norm_eps, "head_dim": shape.head_dim}
        if shape.num_experts:
            keys["num_local_experts"] = shape.num_experts
            keys["num_experts_per_tok"] = shape.experts_per_token
        else:
            keys |= {"attention_bias": shape.bias, "mlp_bias": shape.bias}
    return keys | {"rope_parameters": rotary}


def _gpt2_keys(shape: ModelShape) -> dict[str, Any]:
    rates = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return {
        "n_positions": shape.max_seq_len,
        "n_embd": shape.d_model,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": shape.ff_width,
        "activation_function": _GELU,
        "layer_norm_epsilon": shape.norm_eps,
        **dict.fromkeys(rates, shape.dropout),
    }


def renamed(shape: ModelShape, weights: Named) -> Named:
    """Yield the weights of `Transformer`, renamed and split as in the transformers class."""
    of_gpt2 = class_name(shape) == "GPT2"
    for name, value in weights:
        parts = _to_gpt2(name, value) if of_gpt2 else _to_llama(shape, name, value)
        for new, part in parts:
            yield new, part
            yield from _zero_bias(shape, name, new, value)


def _zero_bias(shape: ModelShape, name: str, new: str, value: Tensor) -> Named:
    """Yield a zero bias for a weight if the class has a bias and the shape does not."""
    if shape.bias or shape.norm == "rmsnorm" or not name.endswith(".weight"):
        return
    normed = "norm" in name
    if normed or (class_name(shape) == "GPT2" and name.startswith("blocks.")):
        yield f"{new.removesuffix('weight')}bias", torch.zeros(value.shape[0])


def _to_gpt2(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not name.startswith("blocks."):
        yield _GPT2_OUTSIDE[name], value
        return
    number, part, kind = _split(name)
    # GPT-2 stores matrices as (in, out).
    turned = value.t() if value.ndim == 2 else value
    yield f"transformer.h.{number}.{_GPT2_PARTS[part]}.{kind}", turned


def _to_llama(shape: ModelShape, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not name.startswith("blocks."):
        yield _OUTSIDE[name], value
        return
    number, part, kind = _split(name)
    path, starcoder = f"model.layers.{number}", class_name(shape) == "Starcoder2"
    if part == "attention.qkv":
        keys = shape.kv_heads * shape.head_dim
        for letter, rows in zip("qkv", value.split([shape.d_model, keys, keys]), strict=True):
            yield f"{path}.self_attn.{letter}_proj.{kind}", rows
    elif part == "mlp.experts":
        yield f"{path}.mlp.experts.{_MIXTRAL_EXPERTS[kind]}", value
    elif part == "mlp.up" and shape.mlp == "swiglu":
        for new, rows in zip(("gate", "up"), value.chunk(2), strict=True):
            yield f"{path}.mlp.{new}_proj.{kind}", rows
    elif part == "mlp.up":
        yield f"{path}.mlp.{'c_fc' if starcoder else 'up_proj'}.{kind}", value
    elif part == "mlp.down" and starcoder:
        yield f"{path}.mlp.c_proj.{kind}", value
    else:
        yield f"{path}.{_PARTS[part]}.{kind}", value


def _split(name: str) -> tuple[str, str, str]:
    """Split blocks.3.mlp.up.weight into (3, mlp.up, weight)."""
    _, number, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return number, part, kind


def byte_tokenizer() -> Any:
    """Return a transformers tokenizer whose tokens are UTF-8 bytes, equal to the tokenizer
    "bytes"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, split_special_tokens=True
    )


def tokenizer_files(name: str) -> tuple[Path | None, Any]:
    """Return (folder of the tokenizer's files, tokenizer to save) for a name of `data.tokenizer`;
    one of them is None, and both are if transformers has no such tokenizer."""
    if name == "bytes":
        return None, byte_tokenizer()
    path = Path(name)
    if path.is_dir():
        return path, None
    if path.suffix == ".json" and path.is_file():
        from transformers import PreTrainedTokenizerFast

        return None, PreTrainedTokenizerFast(tokenizer_file=str(path))
    return None, None
