"""Hugging Face folders to engines and back, against transformers' own loading and saving."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import offloadtrain as ot
from benchmarks.architectures.models import ARCHITECTURES
from benchmarks.round_trip import (
    CELLS,
    KEPT_FP32,
    different_weights,
    of_transformers,
    round_trip,
    tensors,
)
from offloadtrain.engine import ModelError
from offloadtrain.integrations import export
from offloadtrain.runtime.dtypes import PRECISIONS
from tests.benchmarks.rows import SLOW, by_level


@pytest.fixture(autouse=True)
def is_unread() -> None:
    transformers.logging.disable_progress_bar()


QUICK = ("llama", "mixtral")
"""One without and one with a conversion of weights."""
LOADED = ("gpt2", "gemma3", "t5", "whisper", "bert_mlm", "vit", "mamba", "llava")
ROUND_TRIPS = list(
    zip(sorted(SLOW & of_transformers().keys()), itertools.cycle(CELLS), strict=False)
)
"""Architectures of each kind, the cells in turn."""


def slow(case: str) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


def saved(folder: Path, name: str = "llama", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: Any = ARCHITECTURES[name].build()
    model.save_pretrained(folder, **options)
    return model


def load(folder: Path, **options: Any) -> tuple[Any, ot.OffloadOptimizer]:
    return ot.from_pretrained(folder, ot.AdamW(lr=1e-3), **{"device": "cpu", **options})


def assert_equal_to(reference: Any, model: Any, optimizer: ot.OffloadOptimizer) -> None:
    """Masters, buffers, ties and modes of transformers' own model."""
    masters = dict(optimizer.master_weights())
    assert list(masters) == [name for name, _ in reference.named_parameters()]
    for name, param in reference.named_parameters():
        assert torch.equal(masters[name], param.detach().float()), name
    buffers = dict(model.named_buffers())
    assert list(buffers) == [name for name, _ in reference.named_buffers()]
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name
    assert type(model) is type(reference) and model.training == reference.training
    ties = [dict(m.named_parameters(remove_duplicate=False)).keys() for m in (model, reference)]
    assert ties[0] == ties[1]


# ---- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_level(LOADED, QUICK))
def test_the_model_is_the_one_that_transformers_loads(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name, max_shard_size="60KB")
    model, optimizer = load(tmp_path, keep_fp32=KEPT_FP32.get(name, ()))
    assert_equal_to(type(model).from_pretrained(tmp_path), model, optimizer)
    if hasattr(model, "generation_config"):
        assert model.generation_config == type(model).from_pretrained(tmp_path).generation_config
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"working": "host"}),
        (torch.bfloat16, {"state": "split16"}),
        (torch.float16, {"working": "host", "state": "split16"}),
    ],
    ids=str,
)
def test_masters_are_the_values_of_the_files(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Whatever dtype config.json names."""
    model: Any = ARCHITECTURES["llama"].build().to(dtype)
    model.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", dtype="bfloat16")
    values = load_file(tmp_path / "model.safetensors")
    loaded, optimizer = load(tmp_path, **options)
    for name, master in optimizer.master_weights():
        assert torch.equal(master, values[name].float()), name
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    optimizer.close()


CLASSES = {
    "base into head": ("AutoModel", "AutoModelForCausalLM"),
    "head into base": ("AutoModelForCausalLM", "AutoModel"),
    "another head": ("AutoModelForCausalLM", "AutoModelForSequenceClassification"),
}


@pytest.mark.parametrize("case", ["another head", *map(slow, sorted(CLASSES)[1:])])
def test_prefixes_and_new_heads(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (getattr(transformers, name) for name in CLASSES[case])
    made = source.from_config(ARCHITECTURES["llama"].build().config)
    made.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")  # a Trainer sets it to its own
    keys = {"num_labels": 5} if case == "another head" else {}
    torch.manual_seed(7)
    model, optimizer = load(tmp_path, auto_class=CLASSES[case][1], model_kwargs=keys)
    new = {"base into head": "lm_head.weight", "another head": "score.weight"}.get(case, "")
    assert new in caplog.text and ("MISSING" in caplog.text) == bool(new)
    torch.manual_seed(7)
    assert_equal_to(target.from_pretrained(tmp_path, **keys), model, optimizer)
    optimizer.close()


def tied_llama(folder: Path) -> dict[str, Tensor]:
    """A folder of a llama whose head is its embedding; returns the file's tensors."""
    config = ARCHITECTURES["llama"].build().config
    config.tie_word_embeddings = True
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("stored", ["head", *map(slow, ["embedding", "both", "both, different"])])
def test_ties(tmp_path: Path, stored: str, caplog: pytest.LogCaptureFixture) -> None:
    values = tied_llama(tmp_path)
    embedding = values.pop("model.embed_tokens.weight")
    if stored != "head":
        values["model.embed_tokens.weight"] = embedding
    if stored != "embedding":
        values["lm_head.weight"] = embedding.clone() + (1 if stored == "both, different" else 0)
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, optimizer = load(tmp_path)
    assert_equal_to(transformers.LlamaForCausalLM.from_pretrained(tmp_path), model, optimizer)
    different = stored == "both, different"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) != different
    assert ("trained as two weights" in caplog.text) == different
    ot.save_pretrained(optimizer, tmp_path / "out", dtype="fp32")
    written = tensors(tmp_path / "out")
    assert ("lm_head.weight" in written) == different
    assert torch.equal(
        written["model.embed_tokens.weight"], values.get("model.embed_tokens.weight", embedding)
    )
    optimizer.close()


def test_a_conversion_that_needs_values_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.core_model_loading import MergeModulelist

    saved(tmp_path, "mixtral")
    merge = MergeModulelist.convert

    def reading(self: Any, tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for group in tensors.values():
            assert all(x.sum().item() == x.sum().item() for x in group)
        return merge(self, tensors, *args, **kwargs)

    monkeypatch.setattr(MergeModulelist, "convert", reading)
    edit(tmp_path / "config.json", dtype="bfloat16")
    model, optimizer = load(tmp_path)
    assert "cannot be loaded one module at a time" in caplog.text
    reference = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal_to(reference, model, optimizer)
    optimizer.close()


ADAPTERS = '{"working": "host", "lora": {"r": 8, "target_modules": ["q_proj"]}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, "{}"),
        (torch.bfloat16, '{"working": "host", "state": "split16"}'),
        (torch.bfloat16, ADAPTERS),
    ],
)
def test_loading_makes_no_second_copy_of_the_model(
    tmp_path: Path, dtype: torch.dtype, options: str
) -> None:
    for folder, width, layers, vocab in ((tmp_path, 512, 12, 9999), (tmp_path / "tiny", 64, 2, 99)):
        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            vocab_size=vocab,
        )
        transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    command = [sys.executable, "-m", "tests.integrations.peak_memory", str(tmp_path), options]
    memory = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert memory["peak"] <= 1.03 * memory["end"], memory
    # Frozen weights that stay on the device are torch's, not in the engine's account.
    assert options == ADAPTERS or memory["peak"] <= 1.03 * memory["held"], memory


# ---- what is refused ----------------------------------------------------------------------------


def edit(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lack_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    saved(folder, max_shard_size="20KB")
    next(folder.glob("model-00002-of-*")).unlink()


def one_below(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "config.json").rename(folder / "below/config.json")


def of_another_model(folder: Path) -> None:
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})


def in_eight_bits(folder: Path) -> None:
    values = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    values[name] = values[name].to(torch.float8_e4m3fn)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (pickled, r"in pickles \(pytorch_model.bin\).*Write safetensors once"),
    "damaged": (cut_off, r"model.safetensors' is damaged"),
    "a missing shard": (
        lack_a_shard,
        r"model-00002-of-\d+.safetensors' is not there, and the index .* missing shard",
    ),
    "a pointer": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
        ),
        "is a pointer of Git LFS and holds no weights: run `git lfs pull`",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has no .*safetensors: its weights were not downloaded",
    ),
    "GGUF": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"),
        "only GGUF: load it with transformers",
    ),
    "a folder of folders": (
        one_below,
        r"has no config.json; these folders in it have: below",
    ),
    "no model": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json: it is no folder of a model",
    ),
    "no folder": (shutil.rmtree, "there is no such folder"),
    "another model": (
        of_another_model,
        r"no weights for most of LlamaForCausalLM: it lacks .* has weight",
    ),
    "other shapes": (
        lambda folder: edit(folder / "config.json", vocab_size=99),
        r"embed_tokens.weight \(128, 32\), not \(99, 32\)",
    ),
    "quantized": (
        lambda folder: edit(
            folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}
        ),
        r"is quantized \(gptq\)",
    ),
    "eight bits": (in_eight_bits, "has 8 bits and no scale"),
    "no class": (
        lambda folder: edit(folder / "config.json", architectures=None),
        "names no class of transformers: pass auto_class",
    ),
    "adapters": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "holds PEFT adapters: load their base model",
    ),
}


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    """And transformers loads as before afterwards."""
    saved(tmp_path / "good")
    for number, (spoil, message) in enumerate(REFUSED.values()):
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / f"{number}"))
        spoil(folder)
        with pytest.raises(ModelError, match=message):
            load(folder)
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "good")
        assert not loaded.lm_head.weight.is_meta
    with pytest.raises(ValueError, match=r"model_kwargs has device_map: device= and working="):
        load(tmp_path / "good", model_kwargs={"device_map": "auto"})


# ---- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cell"),
    [pytest.param(*row, marks=() if row[0] in QUICK else pytest.mark.slow) for row in ROUND_TRIPS],
)
def test_a_round_trip_without_a_step_changes_no_bit(name: str, cell: str) -> None:
    """`python -m benchmarks.round_trip` has every architecture in every cell."""
    result = round_trip(name, ARCHITECTURES[name], cell)
    assert result.difference == "" and result.outputs


def train(model: nn.Module, optimizer: ot.OffloadOptimizer, steps: int = 2) -> None:
    batch = ARCHITECTURES["llama"].batch(torch.Generator().manual_seed(2))
    for _ in range(steps):
        optimizer.backward(model(**batch).loss)
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", {"state": "int8"}),
        pytest.param("fp16", {"working": "host", "update": "delayed"}, marks=pytest.mark.slow),
        pytest.param("fp32", {"state": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_what_was_trained_is_exported(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    saved(tmp_path / "in")
    model, optimizer = load(tmp_path / "in", **options)
    train(model, optimizer)
    ot.save_pretrained(model, tmp_path / "out", dtype=dtype, max_shard_size="60KB")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.config.dtype == back.dtype == PRECISIONS[dtype]
    params = dict(back.named_parameters())
    for name, master in optimizer.master_weights():
        assert torch.equal(params[name].detach(), master.to(PRECISIONS[dtype])), name
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(tmp_path / "out").keys()
    optimizer.close()


@pytest.mark.slow
def test_a_model_without_an_optimizer(tmp_path: Path) -> None:
    model = saved(tmp_path / "in")
    ot.save_pretrained(model, tmp_path / "out", dtype="fp32", merge=True)  # nothing to merge
    assert different_weights(tmp_path / "in", tmp_path / "out") == ""


def tokenizer() -> Any:
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


def test_the_tokenizer_comes_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "in")
    ot.save_pretrained(transformers.AutoModel.from_pretrained(tmp_path / "in"), tmp_path / "none")
    assert "no tokenizer is written" in caplog.text
    assert ".none-" not in caplog.text  # a folder that is renamed at the end
    tokenizer().save_pretrained(tmp_path / "in")
    _, optimizer = load(tmp_path / "in")
    ot.save_pretrained(optimizer, tmp_path / "copied")
    ot.save_pretrained(optimizer, tmp_path / "given", tokenizer=tokenizer())
    for folder in ("copied", "given"):
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert words("w5 w7").input_ids == [5, 7]
    optimizer.close()


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "in")
    model, optimizer = load(tmp_path / "in")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        ot.save_pretrained(optimizer, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    monkeypatch.undo()
    train(model, optimizer, steps=1)
    optimizer.close()


def test_an_export_that_cannot_be_made_writes_nothing(tmp_path: Path) -> None:
    model = saved(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out' exists and is not empty"):
        ot.save_pretrained(model, tmp_path / "out")
    with pytest.raises(ValueError, match="dtype = 'int8' is not one of 'bf16', 'fp16', 'fp32'"):
        ot.save_pretrained(model, tmp_path / "other", dtype="int8")
    with pytest.raises(ModelError, match="Linear is no model of transformers"):
        ot.save_pretrained(nn.Linear(2, 2), tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]


# ---- where models come from ---------------------------------------------------------------------


@pytest.mark.parametrize("method", [None, lambda model, files: None], ids=["none", "another"])
def test_a_transformers_that_loads_in_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Callable[..., Any] | None
) -> None:
    saved(tmp_path / "in")
    name = "_load_pretrained_model"
    if method is None:
        monkeypatch.delattr(transformers.PreTrainedModel, name)
    else:
        monkeypatch.setattr(transformers.PreTrainedModel, name, staticmethod(method))
    with pytest.raises(ModelError, match=r"in another way than 5\.23.*transformers==5\.23\.0"):
        load(tmp_path / "in")


@pytest.mark.slow
def test_a_name_on_the_hub(tmp_path: Path) -> None:
    """As it lies in the cache after a download."""
    cached = tmp_path / "models--who--llama"
    saved(cached / "snapshots/0123", max_shard_size="60KB")
    tokenizer().save_pretrained(cached / "snapshots/0123")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0123")
    where = {"cache_dir": str(tmp_path), "local_files_only": True}
    model, optimizer = ot.from_pretrained("who/llama", device="cpu", model_kwargs=where)
    reference = transformers.LlamaForCausalLM.from_pretrained("who/llama", **where)
    assert_equal_to(reference, model, optimizer)
    ot.save_pretrained(optimizer, tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("w5").input_ids == [5]
    optimizer.close()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.slow
def test_code_that_the_folder_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    saved(tmp_path / "in")
    (tmp_path / "in/own.py").write_text(CODE)
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = tmp_path / "in/config.json"
    edit(config, model_type="own", architectures=["OwnModel"], auto_map=names)
    with pytest.raises(ot.ModelError, match="trust_remote_code"):
        load(tmp_path / "in")
    model, optimizer = load(tmp_path / "in", trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    ot.save_pretrained(optimizer, tmp_path / "out", dtype="fp32")
    optimizer.close()
    assert (tmp_path / "out/own.py").exists()
    assert different_weights(tmp_path / "in", tmp_path / "out") == ""
    _, again = load(tmp_path / "out", trust_remote_code=True)
    again.close()


@pytest.mark.parametrize("closed", [False, True])
def test_a_moving_average_is_a_folder(tmp_path: Path, closed: bool) -> None:
    saved(tmp_path / "in")
    model, optimizer = load(tmp_path / "in", working="host")
    ema = ot.EMA(optimizer, 0.5)
    for step in range(3):
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        ema.update()
    masters = {name: value.clone() for name, value in optimizer.master_weights()}
    if closed:
        optimizer.close()
    ot.save_pretrained(ema, tmp_path / "out", dtype="fp32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, average), param in zip(ema.weights(), loaded.parameters(), strict=True):
        assert torch.equal(param, average) and not torch.equal(param, masters[name]), name
    optimizer.close()
