"""Shapes: published parameter counts, the ZeRO-Offload table, FLOPs and validation."""

import dataclasses

import pytest

from offloadtrain.config.model_shape import (
    SIZES,
    ModelShape,
    flops_per_token,
    num_params,
)

PUBLISHED = {  # counts of the released checkpoints
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-1.3b": 1_345_423_360,
    "llama-3b": 3_426_473_600,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
}

ZERO_OFFLOAD_TABLE_3 = {  # layers, hidden size
    "gpt-1b": (20, 2048),
    "gpt-2b": (40, 2048),
    "gpt-4b": (64, 2304),
    "gpt-6b": (53, 3072),
    "gpt-8b": (72, 3072),
    "gpt-10b": (50, 4096),
    "gpt-11b": (55, 4096),
    "gpt-12b": (60, 4096),
    "gpt-13b": (65, 4096),
    "gpt-15b": (78, 4096),
    "gpt-20b": (25, 8192),
    "gpt-40b": (50, 8192),
    "gpt-60b": (75, 8192),
    "gpt-70b": (69, 9216),
}

LLAMA_8B = SIZES["llama-8b"]


def small(**changes: object) -> ModelShape:
    shape = ModelShape(vocab_size=256, num_layers=2, d_model=64, num_heads=4)
    return dataclasses.replace(shape, **changes)  # type: ignore[arg-type]


def test_published_parameter_counts() -> None:
    for name in PUBLISHED:
        assert num_params(SIZES[name]) == PUBLISHED[name]


def test_zero_offload_shapes_follow_the_megatron_count() -> None:
    for name in ZERO_OFFLOAD_TABLE_3:
        layers, hidden = ZERO_OFFLOAD_TABLE_3[name]
        shape = SIZES[name]
        assert (shape.num_layers, shape.d_model, shape.head_dim) == (layers, hidden, 128)
        # P = 12·l·h²·(1 + 13/(12h) + (V + s)/(12·l·h)), Megatron SC21 eq. 2, which leaves out the
        # final LayerNorm's 2h
        megatron = 12 * layers * hidden**2 + 13 * layers * hidden + (50304 + 1024) * hidden
        assert num_params(shape) == megatron + 2 * hidden
        assert num_params(shape) / 1e9 == pytest.approx(float(name[4:-1]), rel=0.13)


def test_named_sizes_are_valid() -> None:
    assert {name: size.problems() for name, size in SIZES.items() if size.problems()} == {}
    assert 1e6 <= num_params(SIZES["demo"]) <= 3e6, "small"
    assert SIZES["demo"].vocab_size == 256, "byte-level"


def test_usual_values_are_resolved() -> None:
    assert small().kv_heads == 4
    assert small(num_kv_heads=2).kv_heads == 2
    assert small(mlp="gelu").ff_width == 256
    assert small().ff_width == 192  # 8/3 · 64 = 170.7, up to a multiple of 64
    assert dataclasses.replace(SIZES["llama-7b"], d_ff=0).ff_width == 11008
    assert small(d_ff=100).ff_width == 100


BROKEN: list[tuple[dict[str, object], str]] = [
    ({"vocab_size": 0}, "vocab_size"),
    ({"num_layers": -1}, "num_layers"),
    ({"num_layers": 1025}, "no model has more than 1024"),
    ({"vocab_size": 10**12}, "no model has more than 16777216"),
    ({"d_model": 1 << 22}, "parameters, and at most"),
    ({"d_ff": 1 << 60}, f"d_ff = {1 << 60} and num_experts = 0: the model has"),
    ({"d_model": 0}, "d_model"),
    ({"num_heads": 0}, "num_heads"),
    ({"max_seq_len": 0}, "max_seq_len"),
    ({"max_seq_len": 1 << 24}, "no model has more than 8388608"),
    ({"num_kv_heads": -1}, "num_kv_heads"),
    ({"num_kv_heads": 3}, "num_kv_heads"),
    ({"d_ff": -1}, "d_ff"),
    ({"num_heads": 3}, "num_heads"),
    ({"num_heads": 64}, "even head width"),
    ({"dropout": 1.0}, "dropout"),
    ({"dropout": float("nan")}, "dropout"),
    ({"rope_theta": 0.0}, "rope_theta"),
    ({"norm_eps": float("inf")}, "norm_eps"),
    ({"positions": "absolute"}, "rotary, learned"),
    ({"norm": "batchnorm"}, "rmsnorm, layernorm"),
    ({"mlp": "relu"}, "swiglu, gelu"),
]


def test_each_broken_rule_is_one_sentence() -> None:
    for changes, key in BROKEN:
        (problem,) = small(**changes).problems()
        assert key in problem


def test_flops_of_llama_8b_by_hand() -> None:
    block = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336
    matrices = 32 * block + 128256 * 4096
    assert flops_per_token(LLAMA_8B, 8192) == 6 * matrices + 12 * 32 * 4096 * 8192
