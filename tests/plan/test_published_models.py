"""The published models that `plan --largest` tries have the parameters of their releases."""

from __future__ import annotations

import pytest

from offloadtrain.config.model_shape import num_params
from offloadtrain.plan.search.largest import MODELS

RELEASED = {
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-1.7B": 1_711_376_384,
    "TinyLlama-1.1B": 1_100_048_384,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Mistral-7B": 7_248_023_552,
    "Mistral-Large-123B": 122_610_069_504,
    "Gemma-2B": 2_506_172_416,
    "Phi-3-mini-3.8B": 3_821_079_552,
    "Yi-34B": 34_388_917_248,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
}
"""As their weights on the Hub are counted."""


def test_parameters_are_those_of_the_releases() -> None:
    for name, released in RELEASED.items():
        assert num_params(MODELS[name]) == pytest.approx(released, rel=1e-3), name
    assert all(not shape.problems() for shape in MODELS.values())


def test_the_largest_comes_first() -> None:
    counts = [num_params(shape) for shape in MODELS.values()]
    assert counts == sorted(counts, reverse=True)
