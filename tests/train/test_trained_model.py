"""Text and losses of trained models: of runs, and of folders of transformers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from offloadtrain.cli.main import main
from offloadtrain.data.tokens import TokenFile
from offloadtrain.events import schema
from offloadtrain.integrations import causal_lm
from offloadtrain.integrations.causal_lm import CausalLm, CausalLmError
from offloadtrain.model.language_model import Sampling
from offloadtrain.model.transformer import Transformer
from offloadtrain.train.trained_model import language_model, open_saved
from tests.data.tiny import write_tokens
from tests.train.small_job import events_of, run, small_job

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def exported(trained_run: Path) -> Path:
    """In the precision of the run, so that the weights are the run's."""
    out = trained_run.parent / "exported"
    assert main(["export", str(trained_run), str(out), "--dtype", "bf16"]) == 0
    return out


@pytest.fixture
def val(trained_run: Path) -> Path:
    (path,) = (trained_run.parent / "data").rglob("val.bin")
    return path


def printed(capsys: Captured, *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


# ---- eval


def test_a_run_has_the_loss_of_its_own_validation(
    trained_run: Path, val: Path, capsys: Captured
) -> None:
    logged = events_of(trained_run, schema.Eval)[-1]
    count = (len(TokenFile(val)) - 1) // 32 // 4 * 4 * 32  # of whole microbatches of 4
    options = ("--data", val, "--micro-batch", 4, "--max-tokens", count)
    result = json.loads(printed(capsys, "eval", trained_run, *options, "--json"))
    assert result["tokens"] == logged.tokens == count
    assert result["loss"] == pytest.approx(logged.val_loss, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


@pytest.mark.slow
def test_a_head_that_is_tied_to_the_embedding(tmp_path: Path, capsys: Captured) -> None:
    """As GPT-2's: a run has no weight of its own for it."""
    shape = ("model.tie_embeddings=true", "offload.state=split16", "train.steps=3")
    job = small_job(tmp_path, *shape, "train.eval_every=3", "train.eval_batches=4")
    assert run(job, tmp_path / "run") == 0
    saved = open_saved(tmp_path / "run")
    module = language_model(saved, torch.device("cpu")).module
    assert isinstance(module, Transformer)
    assert module.head.weight is module.embedding.weight
    masters = dict(saved.weights(working=True))
    assert torch.equal(module.head.weight, masters["embedding.weight"].bfloat16())
    (val,) = (tmp_path / "data").rglob("val.bin")
    tokens = events_of(tmp_path / "run", schema.Eval)[-1].tokens
    options = ("--data", val, "--micro-batch", 4, "--max-tokens", tokens)
    result = json.loads(printed(capsys, "eval", tmp_path / "run", *options, "--json"))
    assert 4.0 < result["loss"] < 6.0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    sampling = ("--prompt", "1 + 1 =", "--max-tokens", 16, "--temperature", 0)
    text = printed(capsys, "generate", tmp_path / "run", *sampling)
    assert text == printed(capsys, "generate", tmp_path / "out", *sampling)


def test_the_loss_is_the_mean_over_all_tokens(
    exported: Path, val: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Also where the last batch is smaller, for a run's weights and for its export."""
    tokens = TokenFile(val).tokens[: 5 * 16 + 9]
    write_tokens(tmp_path / "few.bin", [tokens], vocab_size=256, tokenizer="bytes")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    window_BS = torch.stack([torch.from_numpy(tokens[i : i + 17].astype(int)) for i in (0, 16, 32)])
    rest_BS = torch.stack([torch.from_numpy(tokens[i : i + 17].astype(int)) for i in (48, 64)])
    all_BS = torch.cat((window_BS, rest_BS))
    with torch.no_grad():
        logits = model(all_BS[:, :-1]).logits.float()
    expected = F.cross_entropy(logits.flatten(0, 1), all_BS[:, 1:].flatten()).item()
    options = ("--data", tmp_path / "few.bin", "--seq-len", 16, "--micro-batch", 3)
    result = json.loads(printed(capsys, "eval", exported, *options, "--json"))
    assert result["tokens"] == 80 and result["loss"] == pytest.approx(expected, rel=1e-4)
    output = printed(capsys, "eval", exported, *options, "--max-tokens", 20)
    assert output.startswith("loss ") and output.endswith(", 32 tokens\n")


def test_other_tokens_than_the_models_are_refused(
    trained_run: Path, exported: Path, tmp_path: Path, capsys: Captured
) -> None:
    pieces = [torch.arange(100).numpy()]
    write_tokens(tmp_path / "wide.bin", pieces, vocab_size=300, tokenizer="bytes")
    write_tokens(tmp_path / "other.bin", pieces, vocab_size=256, tokenizer="another")
    write_tokens(tmp_path / "own.bin", pieces, vocab_size=256, tokenizer="bytes")
    for source, data, more, message in (
        (exported, "wide.bin", (), "a vocabulary of 300"),
        (trained_run, "other.bin", (), "prepared with the tokenizer another"),
        (trained_run, "own.bin", ("--seq-len", "64"), "longest sequence, 32"),
        (tmp_path, "own.bin", (), "neither a run folder or a checkpoint, nor a folder"),
    ):
        assert main(["eval", str(source), "--data", str(tmp_path / data), *more]) == 2
        assert message in capsys.readouterr().err


# ---- generate


def test_a_run_and_its_export_continue_alike(
    trained_run: Path, exported: Path, capsys: Captured
) -> None:
    """Greedily: each draws from its own generator. 7 + 24 tokens fit the model's 32."""
    options = ("--prompt", "1 + 1 =", "--max-tokens", 24, "--temperature", 0)
    text = printed(capsys, "generate", trained_run, *options)
    assert text.startswith("1 + 1 =")
    assert printed(capsys, "generate", exported, *options) == text


def test_a_seed_gives_a_text(exported: Path, capsys: Captured) -> None:
    """Which leaves generators and mode as they are, and ends at the model's longest sequence."""
    options = ("--prompt", "1 + ", "--max-tokens", 16, "--top-k", 40, "--top-p", 0.95)
    texts = [printed(capsys, "generate", exported, *options, "--seed", seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    model = causal_lm.load(exported, torch.device("cpu"))
    model.module.train()
    before = torch.get_rng_state()
    model.generate(torch.tensor([[1, 2]]), 3, Sampling(seed=5))
    assert torch.equal(torch.get_rng_state(), before) and model.module.training
    model.module.generation_config.eos_token_id = None
    assert model.generate(torch.tensor([[1, 2]]), 100, Sampling(seed=5)).shape == (1, 32)
    with pytest.raises(CausalLmError, match=r"prompt has 32 tokens, and .* has 32"):
        model.generate(torch.ones(1, 32, dtype=torch.int64), 1, Sampling())


def test_what_has_no_text_is_refused(exported: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "is no causal language model" in capsys.readouterr().err
    weights = (exported / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 1
    assert "has no tokenizer that can be loaded" in capsys.readouterr().err


def test_without_transformers_it_says_what_to_install(
    trained_run: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments in (
        ["export", str(trained_run), str(trained_run.parent / "never")],
        ["generate", str(exported), "--prompt", "a"],
    ):
        assert main(arguments) == 2
        assert "pip install 'offloadtrain[hf]'" in capsys.readouterr().err


# ---- the loss of models of transformers


def tiny(name: str, **more: Any) -> Any:
    config = transformers.AutoConfig.for_model(
        name,
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    ],
)
def test_the_loss_is_the_models_own(name: str, more: dict[str, Any]) -> None:
    model = tiny(name, **more).train()
    window_BS = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(0))
    tokens_BT, targets_BT = window_BS[:, :-1], window_BS[:, 1:].contiguous()
    expected = model(tokens_BT, labels=tokens_BT, shift_labels=targets_BT).loss
    loss = CausalLm.of(model).loss(tokens_BT, targets_BT)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    own_grads = torch.autograd.grad(expected, list(model.parameters()))
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for grad, other in zip(grads, own_grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-7)


def test_a_loss_of_another_kind_is_refused() -> None:
    model = tiny("llama")
    model.loss_type = "ForMaskedLM"
    with pytest.raises(CausalLmError, match="a loss of kind ForMaskedLM"):
        CausalLm.of(model)
