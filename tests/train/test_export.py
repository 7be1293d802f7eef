"""Runs as folders of transformers: the same logits, tokenizer, text and losses, and refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import linear as linear_of

from offloadtrain.cli.main import main
from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.convert import torch_export
from offloadtrain.data.tokens import TokenFile
from offloadtrain.integrations import export
from offloadtrain.integrations.causal_lm import CausalLm, CausalLmError
from offloadtrain.integrations.export import CHECKSUMS
from offloadtrain.integrations.own_model import NoClassError, class_name, empty_model, renamed
from offloadtrain.model.experts import MixtureOfExperts
from offloadtrain.model.layers import RotaryTables
from offloadtrain.model.transformer import Transformer
from offloadtrain.train.trained_model import open_saved
from tests.conftest import Command
from tests.data.tiny import write_tokens

SMALL = ModelShape(vocab_size=97, num_layers=2, d_model=32, num_heads=4, max_seq_len=24)
GPT2 = replace(SMALL, positions="learned", norm="layernorm", mlp="gelu", bias=True)
SHAPES = {
    "llama": SMALL,
    "llama, grouped heads, biases, tied": replace(
        SMALL, num_kv_heads=2, bias=True, tie_embeddings=True, rope_theta=5e5, norm_eps=1e-6
    ),
    "arcee": replace(SMALL, mlp="gelu", num_kv_heads=2),
    "arcee, biases": replace(SMALL, mlp="gelu", bias=True),
    "stablelm": replace(SMALL, norm="layernorm", num_kv_heads=1),
    "starcoder2": replace(SMALL, norm="layernorm", mlp="gelu", d_ff=40),
    "starcoder2, biases": replace(SMALL, norm="layernorm", mlp="gelu", bias=True),
    "mixtral": replace(SMALL, num_experts=5, experts_per_token=3, d_ff=44, num_kv_heads=2),
    "gpt2": replace(GPT2, tie_embeddings=True),
    "gpt2, no biases": replace(GPT2, bias=False, norm_eps=1e-3),
}


@pytest.fixture(autouse=True)
def is_unread() -> None:
    transformers.logging.disable_progress_bar()


def drawn(shape: ModelShape) -> Transformer:
    """Larger weights than a new model's, biases and norms included: nothing may be left out."""
    model, generator = Transformer(shape), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.eval()


def named(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    return ((name, param.detach()) for name, param in model.named_parameters())


def as_transformers(model: Transformer) -> Any:
    empty = empty_model(model.shape, end_of_document=None)
    converted = type(empty)(empty.config)
    weights = dict(renamed(model.shape, named(model)))
    lacking = converted.load_state_dict(weights, strict=False)
    ties = {"lm_head.weight"} if model.shape.tie_embeddings else set()
    assert set(lacking.missing_keys) == ties and not lacking.unexpected_keys
    return converted.eval()


def divide_products(model: Transformer) -> None:
    """Computes queries, keys, values, gate and up in one product each, as the class does: a matrix
    product may add in another order where it has more columns (so it does on a Zen 4)."""
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        kv = attention.kv_heads * attention.head_dim
        sides = [attention.num_heads * attention.head_dim, kv, kv]
        parts = [(attention.qkv, sides)]
        if not isinstance(mlp, MixtureOfExperts) and mlp.gated:
            parts.append((mlp.up, [mlp.up.out_features // 2] * 2))
        for linear, rows in parts:
            linear.register_forward_hook(in_parts(rows))


def in_parts(rows: list[int]) -> Callable[[Any, Any, Any], Tensor]:
    def recomputed(linear: Any, inputs: Any, _: Any) -> Tensor:
        biases = [None] * len(rows) if linear.bias is None else linear.bias.split(rows)
        parts = zip(linear.weight.split(rows), biases, strict=True)
        return torch.cat([linear_of(inputs[0], *part) for part in parts], dim=-1)

    return recomputed


@torch.no_grad()
def test_the_class_gives_the_same_logits() -> None:
    """To the bit, once rotary angles are those of the class, which rounds them to fp32, and each of
    its products is one; with ours, angles in fp64, the largest difference is 1e-6 of the largest
    logit."""
    tokens_BT = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    for name, shape in SHAPES.items():
        model = drawn(shape)
        other = as_transformers(model)
        logits, expected = model(tokens_BT), other(tokens_BT).logits
        assert (logits - expected).abs().max() <= 1e-6 * logits.abs().max(), name
        if isinstance(model.positions, RotaryTables):
            cos_1TH, sin_1TH = other.model.rotary_emb(logits, torch.arange(24)[None])
            model.positions.cos_TP, model.positions.sin_TP = (
                table[0].chunk(2, dim=-1)[0] for table in (cos_1TH, sin_1TH)
            )
        if class_name(model.shape) != "GPT2":
            divide_products(model)
        assert torch.equal(model(tokens_BT), expected), name


REFUSED = {
    "learned positions with rmsnorm": replace(GPT2, norm="rmsnorm"),
    "learned positions with layernorm and swiglu": replace(GPT2, mlp="swiglu"),
    "biases in all linear layers": replace(SMALL, norm="layernorm", bias=True),
    r"grouped heads \(num_kv_heads = 2\)": replace(GPT2, num_kv_heads=2),
    "experts with experts_per_token = 1": replace(SMALL, num_experts=4, experts_per_token=1),
    "rmsnorm and swiglu and biases and experts": replace(SMALL, num_experts=4, bias=True),
}


def test_a_shape_without_a_class_is_refused_by_name() -> None:
    assert {class_name(shape) for shape in SIZES.values()} == {"Llama", "GPT2"}
    for message, shape in REFUSED.items():
        with pytest.raises(NoClassError, match=message):
            class_name(shape)


def assert_has_masters(model: Any, path: Path) -> None:
    """A model of transformers has the masters of a run, to the bit."""
    saved = open_saved(path)
    masters = dict(renamed(saved.job.model, saved.weights()))
    assert model.state_dict().keys() == masters.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, masters[name]), name


def test_a_run_becomes_a_folder_of_transformers(
    trained_run: Path, tmp_path: Path, command: Command
) -> None:
    """Run or checkpoint; from masters; with the tokenizer that the run has."""
    newest = trained_run / "checkpoints" / "step-00000003"
    for number, source in enumerate((trained_run, newest)):
        out = tmp_path / f"out-{number}"
        output = command("export", source, out, "--dtype", "fp32")
        assert output.out == f"{out}\n" and "step-00000003 as LlamaForCausalLM" in output.err
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert_has_masters(model, trained_run)
    words = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("1 + 1 = 2\n", "Ā  naïve\x00 日本", " <s> "):
        assert words(text)["input_ids"] == list(text.encode())
        assert words.decode(list(text.encode())) == text
    assert model.generation_config.eos_token_id == 0


def test_a_disk_that_refuses_is_one_line(
    trained_run: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """safetensors has an error of its own, which contains the system's number."""
    for code in (errno.ENOSPC, errno.EROFS):

        def refuse(*_: Any, code: int = code, **__: Any) -> None:
            reason = f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})"
            raise SafetensorError(reason)

        monkeypatch.setattr(export, "save_file", refuse)
        (line,) = command("export", trained_run, tmp_path / "out", code=1).err.splitlines()
        assert os.strerror(code) in line
        assert list(tmp_path.iterdir()) == []


def test_a_signal_leaves_no_half_of_a_folder(
    trained_run: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        before = signal.getsignal(number)

        def interrupted(*_: Any, number: int = number, **__: Any) -> None:
            os.kill(os.getpid(), number)

        monkeypatch.setattr(export, "save_file", interrupted)
        monkeypatch.setattr(torch_export, "_fill", interrupted)
        for words in (["export"], ["convert", "--to", "torch"]):
            assert command(*words, trained_run, tmp_path / "out", code=1).err == "interrupted\n"
            assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(number) == before


# ---- text and losses of trained models

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


# ---- generate


def test_a_run_and_its_export_continue_alike(
    trained_run: Path, exported: Path, capsys: Captured
) -> None:
    """Greedily: each draws from its own generator. 7 + 24 tokens fit the model's 32."""
    options = ("--prompt", "1 + 1 =", "--max-tokens", 24, "--temperature", 0)
    text = printed(capsys, "generate", trained_run, *options)
    assert text.startswith("1 + 1 =")
    assert printed(capsys, "generate", exported, *options) == text


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_a_changed_bit_of_an_exported_folder_is_found_by_its_checksums(
    exported: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported, tmp_path / "out")
    command = ["sha256sum", "--check", "--strict", "--quiet", CHECKSUMS]
    listed = {line.split("  ")[1] for line in (folder / CHECKSUMS).read_text().splitlines()}
    assert listed == {path.name for path in folder.iterdir()} - {CHECKSUMS}
    assert subprocess.run(command, cwd=folder).returncode == 0
    for name in sorted(listed):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert found.returncode == 1 and found.stdout == f"{name}: FAILED\n"
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)


def test_what_cannot_be_exported_evaluated_or_continued_is_refused(
    trained_run: Path,
    exported: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = [torch.arange(100).numpy()]
    for name, size, tokenizer in (
        ("wide", 300, "bytes"),
        ("o", 256, "another"),
        ("a", 256, "bytes"),
    ):
        path = tmp_path / f"{name}.bin"
        write_tokens(path, pieces, vocab_size=size, tokenizer=tokenizer, tokenizer_id=tokenizer)
    no_run, untrained, part, torn = (tmp_path / name for name in ("no", "run", "part", "torn"))
    (untrained / "checkpoints").mkdir(parents=True)
    for folder, names in ((part, ("config.json",)), (torn, ("config.json", "model.safetensors"))):
        folder.mkdir()
        for name in names:
            shutil.copy(exported / name, folder / name)
    no_run.mkdir()
    before = sorted(tmp_path.rglob("*"))
    for message, *arguments in (
        ("is not empty", "export", trained_run, part),
        ("neither a run folder", "export", no_run, tmp_path / "out"),
        ("gone is not there", "export", tmp_path / "gone", tmp_path / "out"),
        ("gone is not there", "eval", tmp_path / "gone", "--data", tmp_path / "a.bin"),
        ("gone is not there", "trace", tmp_path / "gone"),
        ("gone is not there", "checkpoints", tmp_path / "gone"),
        ("has no checkpoint yet", "export", untrained, tmp_path / "out"),
        ("a vocabulary of 300", "eval", exported, "--data", tmp_path / "wide.bin"),
        ("with another tokenizer (another)", "eval", trained_run, "--data", tmp_path / "o.bin"),
        ("sequence, 32", "eval", trained_run, "--data", tmp_path / "a.bin", "--seq-len", 64),
        ("nor a checkpoint, nor a folder", "eval", no_run, "--data", tmp_path / "a.bin"),
        ("neither a run folder", "generate", no_run, "--prompt", "a"),
        ("has no *.safetensors", "generate", part, "--prompt", "a"),
        ("transformers cannot load a tokenizer", "generate", torn, "--prompt", "a"),
    ):
        assert message in command(*arguments, code=2).err
    monkeypatch.setitem(sys.modules, "transformers", None)
    for arguments in (
        ["export", trained_run, tmp_path / "out"],
        ["generate", exported, "--prompt", "a"],
    ):
        assert "pip install 'offloadtrain[hf]'" in command(*arguments, code=2).err
    # Refused before a checkpoint is read or a package imported, which take seconds.
    assert "is not empty" in command("export", untrained, part, code=2).err
    assert sorted(tmp_path.rglob("*")) == before


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
    """Not one of another name: that of `ForConditionalGeneration` is the next token's."""
    model = tiny("llama")
    model.loss_type = "ForConditionalGeneration"
    CausalLm.of(model)
    model.loss_type = "ForMaskedLM"
    with pytest.raises(CausalLmError, match="a loss of kind ForMaskedLM"):
        CausalLm.of(model)
    model.loss_type, model.config.is_encoder_decoder = "ForConditionalGeneration", True
    with pytest.raises(CausalLmError, match="over the output of an encoder"):
        CausalLm.of(model)
