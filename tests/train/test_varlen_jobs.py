"""Jobs with `data.varlen_attention`: the losses of those under a mask, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.hf_model import HfModel
from offloadtrain.events import schema
from offloadtrain.integrations import hf_job
from offloadtrain.integrations.causal_lm import (
    VARLEN_ATTENTION,
    CausalLm,
    attend_within_documents,
)
from offloadtrain.model.language_model import Sampling
from offloadtrain.train.trained_model import evaluate, open_model
from tests.train.small_job import ENCODER, events_of, run, small_job
from tests.train.test_hf_jobs import hf_job_of, plain_losses, write_short

ISOLATED, VARLEN = "data.packing=isolated", "data.varlen_attention=true"
FP32 = "offload.precision=fp32"


def losses_of(folder: Path) -> list[float]:
    return [step.loss for step in events_of(folder, schema.Step)]


@pytest.mark.parametrize("overrides", [(), ENCODER], ids=["decoder", "encoder"])
def test_a_job_has_the_losses_of_one_with_a_mask(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    keys = (*overrides, "model.dropout=0.0", ISOLATED, FP32, "train.steps=4")
    for name, override in (("masked", ()), ("varlen", (VARLEN,))):
        assert run(small_job(tmp_path, *keys, *override), tmp_path / name) == 0
    masked, varlen = losses_of(tmp_path / "masked"), losses_of(tmp_path / "varlen")
    assert varlen == pytest.approx(masked, rel=1e-5) and varlen[-1] < varlen[0]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", ("train.chunked_loss=true", "offload.working=host")),
        pytest.param("qwen3", ("offload.activation=recompute",), marks=pytest.mark.slow),
        pytest.param("mixtral", (), marks=pytest.mark.slow),
    ],
)
def test_a_model_of_transformers_has_the_losses_of_a_plain_loop(
    tmp_path: Path, name: str, overrides: tuple[str, ...]
) -> None:
    """Whose mask says which token sees which. Its run evaluates to its last validation loss."""
    source = f"data.source={write_short(tmp_path)}"
    job = hf_job_of(
        tmp_path, name, ISOLATED, VARLEN, FP32, source, "train.eval_every=4", *overrides
    )
    assert run(job, tmp_path / "run") == 0
    assert losses_of(tmp_path / "run") == pytest.approx(plain_losses(job), rel=1e-5)
    assert VARLEN_ATTENTION not in (tmp_path / "run" / "resolved.toml").read_text()
    trained = open_model(tmp_path / "run", torch.device("cpu"))
    # Its mask does the same, also where a sequence is longer than those of training.
    attention: Any = trained.model.module
    assert attention.config._attn_implementation != VARLEN_ATTENTION
    (val,) = (tmp_path / "data").rglob("val.bin")
    last = events_of(tmp_path / "run", schema.Eval)[-1]
    result = evaluate(trained, val, seq_len=32, batch=4, most_tokens=4 * 32)
    assert result.loss == pytest.approx(last.val_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "keys", "why"),
    [
        ("gpt2", {"attn_pdrop": 0.1}, "GPT2LMHeadModel: its attention has dropout of 0.1"),
        ("mistral", {"sliding_window": 16}, "MistralForCausalLM: .* a window of 16 tokens"),
        ("gemma2", {"sliding_window": 64, "head_dim": 8}, "Gemma2ForCausalLM: .* capped scores"),
        ("gpt_oss", {"head_dim": 8}, "GptOssForCausalLM lets attention, or its recurrence"),
        ("doge", {}, "DogeForCausalLM: .* a mask or a bias of its own"),
        ("falcon", {}, "FalconForCausalLM (lets|computes) attention"),  # by release of transformers
        ("bloom", {}, "BloomForCausalLM lets attention, or its recurrence"),
        ("opt", {"attention_dropout": 0.1}, "OPTForCausalLM lets attention, or its recurrence"),
        ("qwen3_next", {"head_dim": 8}, "Qwen3NextForCausalLM lets attention, or its recurrence"),
    ],
)
def test_attention_that_it_does_not_compute_is_refused_by_name(
    tmp_path: Path, kind: str, keys: dict[str, Any], why: str
) -> None:
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=16,
        num_hidden_layers=1,
        vocab_size=256,
        num_attention_heads=2,
        num_key_value_heads=2,
        **keys,
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(OffloadTrainError, match=why):
        hf_job.check_can(HfModel(hf=str(tmp_path)), chunked=False, isolated=True, varlen=32)


def test_a_wide_window_and_attention_without_dropout_are_taken(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(
        "mistral", hidden_size=16, num_hidden_layers=1, vocab_size=256, sliding_window=32,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    hf_job.check_can(HfModel(hf=str(tmp_path)), chunked=False, isolated=True, varlen=32)


@pytest.mark.parametrize("kind", ["falcon", "bloom", "xglm"])
def test_attention_that_no_function_replaces_is_refused(kind: str) -> None:
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=16, num_hidden_layers=1, vocab_size=256, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(OffloadTrainError, match="computes attention by code of its own"):
        attend_within_documents(model)


def test_a_text_may_be_longer_than_the_window_of_attention() -> None:
    """In training no window is computed; a generated text has the model's own attention."""
    config = transformers.AutoConfig.for_model(
        "mistral", hidden_size=16, num_hidden_layers=1, vocab_size=256, sliding_window=8,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompt_BT = torch.arange(12)[None]
    sampling = Sampling(temperature=0.0)
    expected = CausalLm.of(model).generate(prompt_BT, 4, sampling)
    attend_within_documents(model)
    assert torch.equal(CausalLm.of(model).generate(prompt_BT, 4, sampling), expected)
    assert model.config._attn_implementation == VARLEN_ATTENTION


def test_text_is_generated_by_a_model_with_it(tmp_path: Path) -> None:
    """As by the model without: a text is one document."""
    keys = (ISOLATED, VARLEN, FP32, "train.sample_tokens=8", "train.eval_every=0")
    job = hf_job_of(tmp_path, "llama", *keys)
    assert run(job, tmp_path / "run") == 0
    (varlen,) = events_of(tmp_path / "run", schema.Sample)
    assert run(hf_job_of(tmp_path, "llama", *keys[:1], *keys[2:]), tmp_path / "masked") == 0
    (masked,) = events_of(tmp_path / "masked", schema.Sample)
    assert varlen.text == masked.text
