"""Jobs over models of transformers: trained as by a plain loop, planned to the byte, resumed to the
bit, exported."""

from __future__ import annotations

import json
import shutil
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.hf_model import HfModel
from offloadtrain.config.job import Config
from offloadtrain.config.sections import IGNORED
from offloadtrain.data.batches import Batches
from offloadtrain.events import schema
from offloadtrain.hardware.machine import find
from offloadtrain.integrations import hf_job
from offloadtrain.optim.lr_schedule import learning_rate
from offloadtrain.optim.update_rules import decay_groups, update_rule
from offloadtrain.plan import report
from offloadtrain.plan.plan import make
from offloadtrain.train.build import (
    assemble,
    check_tokenizers,
    described,
    open_tokens,
    tracer_of,
)
from offloadtrain.train.checkpoint.save import Save
from offloadtrain.train.dry_run import laid_out
from offloadtrain.train.trained_model import evaluate, open_model, open_saved
from offloadtrain.train.trainer import Trainer
from tests.conftest import Command
from tests.data import tiny
from tests.train.small_job import JOB, events_of, history, run, tensor_hashes, write_text

pytestmark = pytest.mark.filterwarnings(  # a name that PEFT uses of transformers
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

NORM = "base_model.model.model.norm.weight"
LORA = 'model.lora={r = 4, alpha = 8, target_modules = ["q_proj", "v_proj"]}'
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        "num_local_experts": 2,
    },
    "qwen3": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16},
        "tie_word_embeddings": True,
    },
    "gemma3": {  # as published: a language model with the eyes that text does not use
        "text_config": {
            **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 64, "sliding_window": 16},
        },
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        },
        "mm_tokens_per_image": 4,
    },
}


@pytest.fixture(autouse=True)
def is_unread() -> None:
    transformers.logging.disable_progress_bar()


def saved(folder: Path, name: str = "llama") -> Path:
    values: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    if name != "gemma3":
        values["vocab_size"] = 256
    if name in ("llama", "mixtral", "qwen3"):
        values |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        values["max_position_embeddings"] = 64
    config = transformers.AutoConfig.for_model(name, **values, **ARCHITECTURES[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / name)
    return folder / name


def hf_job_of(folder: Path, name: str = "llama", *overrides: str) -> Config:
    write_text(folder)
    hf = folder / name if (folder / name).exists() else saved(folder, name)
    head, _, rest = JOB.format(folder=folder).partition("[model]")
    text = f'{head}[model]\nhf = "{hf}"\n[data]{rest.partition("[data]")[2]}'
    return jobs.loads(text, "small", ("train.steps=4", "train.eval_batches=1", *overrides))


# ---- the job


def test_a_job_loads_back_equal(tmp_path: Path) -> None:
    job = hf_job_of(tmp_path, "llama", LORA, "model.init=random")
    assert jobs.loads(jobs.dump(job)) == job
    assert job.hf is not None and job.hf.lora is not None
    assert (job.hf.lora.r, job.hf.lora.target_modules) == (4, ("q_proj", "v_proj"))
    assert (job.model.num_layers, job.model.kv_heads, job.model.max_seq_len) == (2, 2, 64)
    tables = json.loads(json.dumps(jobs.as_tables(job)))
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    shutil.rmtree(tmp_path / "llama")
    assert jobs.of_tables(tables, "saved", config) == job, "without its folder"


def test_wrong_keys_are_refused(tmp_path: Path) -> None:
    for override, message in (
        ("model.hf=nowhere", "model.hf = 'nowhere': no config.json"),
        ("model.init=zeros", "model.init = 'zeros' must be one of weights, random"),
        ("model.size=debug", r"model.size is config.json's with model.hf"),
        ("model.num_layers=3", r"model.num_layers is config.json's with model.hf"),
        ("model.lora=8", "model.lora = 8 must be a table"),
        ("model.lora={r = 0}", "model.lora.r = 0 must be at least 1"),
        ("model.lora={rank = 1}", "rank is unknown"),
        ("data.seq_len=65", "must be at most model.max_seq_len = 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            hf_job_of(tmp_path, "llama", override)
    path = tmp_path / "llama" / "config.json"
    config = json.loads(path.read_text())
    del config["num_attention_heads"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"no num_attention_heads or n_head .*cannot be planned"):
        hf_job_of(tmp_path)


def test_weights_are_trained_on_tokens_of_their_own_tokenizer(tmp_path: Path) -> None:
    job = hf_job_of(tmp_path)
    tokens_of_bytes, _ = open_tokens(job)
    assert tokens_of_bytes.header.tokenizer == "bytes", "the folder has no tokenizer"
    tiny.folder(tmp_path / "llama")
    changed = replace(job, data=replace(job.data, cache=str(tmp_path / "own")))
    assert open_tokens(changed)[0].header.tokenizer == str(tmp_path / "llama")
    files = replace(job.data, source="", train=str(tokens_of_bytes.path), val="")
    with pytest.raises(ConfigError, match=r"another tokenizer \(bytes\) than that of the weights"):
        check_tokenizers(replace(job, data=files), tokens_of_bytes, None)
    check_tokenizers(replace(job, data=replace(files, tokenizer="bytes")), tokens_of_bytes, None)
    check_tokenizers(hf_job_of(tmp_path, "llama", "model.init=random"), tokens_of_bytes, None)
    shutil.rmtree(tmp_path / "llama")
    check_tokenizers(replace(job, data=files), tokens_of_bytes, None)


def test_a_run_on_files_resumes_beside_a_tokenizer_that_came_later(tmp_path: Path) -> None:
    job = hf_job_of(tmp_path)
    files = replace(job.data, source="", train=str(open_tokens(job)[0].path), val="")
    job = replace(job, data=files, train=replace(job.train, eval_every=0))
    assert run(job, tmp_path / "run") == 0
    tiny.folder(tmp_path / "llama")
    longer = replace(job, train=replace(job.train, steps=5))
    assert run(longer, tmp_path / "run", resume=str(tmp_path / "run")) == 0
    warnings = [event.message for event in events_of(tmp_path / "run", schema.Warning_)]
    assert not any("tokenizer" in message for message in warnings)


def test_a_name_is_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    shutil.move(saved(tmp_path), repository / "snapshots" / "abc")
    saved(tmp_path)
    job = hf_job_of(tmp_path, "llama", "model.hf=some/tiny")
    assert job.hf is not None and job.hf.folder == repository / "snapshots" / "abc"


# ---- the plan


@pytest.mark.parametrize(
    ("name", "overrides", "ranks"),
    [
        ("llama", (), 1),
        ("gpt2", ("offload.working=host", "optim.decay=all"), 1),
        ("qwen3", (LORA, "offload.working=host"), 2),
        pytest.param("mixtral", ("offload.state=int8",), 2, marks=pytest.mark.slow),
        pytest.param("llama", (LORA, "offload.update=speculative"), 1, marks=pytest.mark.slow),
        pytest.param("qwen3", ("offload.keep_fp32=['*norm*']",), 1, marks=pytest.mark.slow),
        pytest.param("gemma3", ("offload.working=host",), 1, marks=pytest.mark.slow),
    ],
)
def test_the_engine_holds_what_is_planned(
    tmp_path: Path, name: str, overrides: tuple[str, ...], ranks: int
) -> None:
    job = described(hf_job_of(tmp_path, name, *overrides))
    machine_name, machine = find("cpu2")
    plan = make(job, machine_name, machine, ranks)
    laid_out(plan)  # raises where spec or bytes differ
    assert job.hf is not None
    model = hf_job.described_model(job.hf)
    assert job.num_params == sum(param.numel() for param in model.parameters())
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert job.num_trained == trained
    streamed = bool(plan.placed.spec.streamed)
    assert (plan.placed.frozen_bytes > 0) == (trained < job.num_params)
    assert streamed == ("offload.working=host" in overrides)
    assert plan.prediction.seconds > 0 and plan.prediction.h2d_bytes >= 0


# ---- training


def plain_losses(job: Config) -> list[float]:
    """Of torch alone, in fp32, over the same batches."""
    assert job.hf is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(job.hf.folder).train()
    rule, train = update_rule(job.optim), job.train
    optimizer = torch.optim.AdamW(
        decay_groups(model, job),
        lr=1.0,
        betas=rule.betas,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
    )
    tokens, _ = open_tokens(job)
    packing = job.data.packing
    batches = Batches(tokens, batch=train.micro_batch, seq_len=32, packing=packing, seed=train.seed)
    losses = []
    for step in range(train.steps):
        total, microbatches = 0.0, [batches.next() for _ in range(train.grad_accum_steps)]
        count = sum(int((batch.targets_BT != IGNORED).sum()) for batch in microbatches)
        for tokens_BT, targets_BT, positions_BT in microbatches:
            arguments: dict[str, Any] = {} if positions_BT is None else apart(positions_BT)
            arguments |= {"shift_labels": targets_BT, "num_items_in_batch": torch.tensor(count)}
            out = model(tokens_BT, labels=tokens_BT, **arguments)
            out.loss.backward()
            total += out.loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step,
                peak=job.optim.lr,
                schedule="cosine",
                total_steps=train.steps,
                warmup_steps=job.optim.warmup_steps,
                min_ratio=job.optim.min_lr_ratio,
            )
        optimizer.step()
        optimizer.zero_grad()
    return losses


def apart(positions_BT: Tensor) -> dict[str, Tensor]:
    """Positions, and a mask that says which token sees which: those of its document before it."""
    document_BT = (positions_BT == 0).cumsum(1)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    mask_B1TT = (same_BTT & torch.ones_like(same_BTT[0]).tril())[:, None]
    assert not mask_B1TT[:, :, -1].all(), "a document begins inside a sequence"
    return {"position_ids": positions_BT, "attention_mask": mask_B1TT}


def write_short(folder: Path) -> Path:
    """Write documents of which several are in a sequence."""
    path = folder / "short.jsonl"
    path.write_text("".join(f'{{"text": "{a} + 1 = {a + 1}"}}\n' for a in range(400)))
    return path


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", ("train.chunked_loss=true",)),
        pytest.param("llama", (), marks=pytest.mark.slow),
        pytest.param("gpt2", (), marks=pytest.mark.slow),
        pytest.param("gemma3", ("train.chunked_loss=true",), marks=pytest.mark.slow),
        pytest.param("gemma3", ("offload.working=host",), marks=pytest.mark.slow),
        pytest.param("mixtral", ("train.chunked_loss=true",), marks=pytest.mark.slow),
        pytest.param("llama", ("data.packing=isolated",), marks=pytest.mark.slow),
        pytest.param(
            "qwen3", ("data.packing=isolated", "train.chunked_loss=true"), marks=pytest.mark.slow
        ),
    ],
)
def test_losses_are_those_of_a_plain_loop(
    tmp_path: Path, name: str, overrides: tuple[str, ...]
) -> None:
    """GPT-2's dropout is switched off: the two draw differently."""
    folder = saved(tmp_path, name)
    if name == "gpt2":
        config = json.loads((folder / "config.json").read_text())
        config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        (folder / "config.json").write_text(json.dumps(config))
    overrides = (*overrides, f"data.source={write_short(tmp_path)}", "offload.precision=fp32")
    job = hf_job_of(tmp_path, name, *overrides)
    assert run(job, tmp_path / "run") == 0
    losses = [step.loss for step in events_of(tmp_path / "run", schema.Step)]
    assert losses == pytest.approx(plain_losses(job), rel=1e-5) and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "override", "why"),
    [
        ("gemma2", "train.chunked_loss=true", "train.chunked_loss = true: the loss of Gemma2For"),
        ("mamba", "data.packing=isolated", "MambaForCausalLM lets attention, or its recurrence"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_its_weights_are_read(
    tmp_path: Path, kind: str, override: str, why: str
) -> None:
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=16, num_hidden_layers=1, vocab_size=256, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    chunked, isolated = "chunked" in override, "isolated" in override
    with pytest.raises(OffloadTrainError, match=why):
        hf_job.check_can(HfModel(hf=str(tmp_path)), chunked=chunked, isolated=isolated)


LIGER = "model.use_liger_kernel=true"


def install_liger(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """Stand in for Liger, whose kernels need a GPU: in training, its forward takes targets that are
    shifted already, divides their sum, and returns no logits."""

    def forward(model: Any, input_ids: Tensor, shift_labels: Any = None, **more: Any) -> Any:
        counts, _ = more.pop("num_items_in_batch", None), more.pop("labels", None)
        calls.append((model.training, shift_labels is not None))
        if not model.training:
            return type(model).forward(model, input_ids, **more)
        hidden = model.model(input_ids, **more)[0].flatten(0, 1)
        logits = nn.functional.linear(hidden, model.lm_head.weight)
        loss = nn.functional.cross_entropy(logits, shift_labels.flatten(), reduction="sum")
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss / counts)

    def apply(model: Any, **_: Any) -> None:
        model.forward = types.MethodType(forward, model)

    modules = {name: types.ModuleType(name) for name in (*LIGER_MODULES, "triton")}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    package, types_of_models = (modules[name] for name in LIGER_MODULES[1:])
    package.__dict__["_apply_liger_kernel_to_instance"] = apply
    types_of_models.__dict__["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"llama": apply}
    available = "transformers.integrations.liger.is_liger_kernel_available"
    monkeypatch.setattr(available, lambda: True)


LIGER_MODULES = (
    "liger_kernel",
    "liger_kernel.transformers",
    "liger_kernel.transformers.monkey_patch",
)


def test_a_job_with_ligers_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    install_liger(monkeypatch, calls)
    monkeypatch.setattr(hf_job, "liger_problem", lambda device: "")
    source = f"data.source={write_short(tmp_path)}"
    job = hf_job_of(tmp_path, "llama", LIGER, "offload.precision=fp32", source)
    assert run(job, tmp_path / "run") == 0
    losses = [step.loss for step in events_of(tmp_path / "run", schema.Step)]
    assert losses == pytest.approx(plain_losses(job), rel=1e-5)
    assert set(calls) == {(True, True), (False, False)}, "in training with targets, else without"
    saved_job = jobs.load(tmp_path / "run" / "resolved.toml")
    assert saved_job.hf is not None and saved_job.hf.use_liger_kernel


def test_ligers_kernels_are_refused_before_memory_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hf_job_of(tmp_path, "qwen3", LIGER)
    assert job.hf is not None
    with pytest.raises(ConfigError, match=r"use_liger_kernel = true: .*'offloadtrain\[fused\]'"):
        assemble(job)
    install_liger(monkeypatch, [])
    with pytest.raises(ConfigError, match=r"use_liger_kernel = true: .* and the device is cpu"):
        assemble(job)
    with pytest.raises(ConfigError, match=r"no kernels for models of type qwen3; leave it out"):
        hf_job.check_liger(job.hf, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"chunked_loss = true and model.use_liger_kernel = true"):
        hf_job_of(tmp_path, "qwen3", LIGER, "train.chunked_loss=true")
    with pytest.raises(ConfigError, match=r"use_liger_kernel = true with stages or parts"):
        hf_job_of(tmp_path, "qwen3", LIGER, "ranks.tensor=2")


@pytest.mark.slow
def test_a_plan_with_ligers_loss_has_no_logits(tmp_path: Path) -> None:
    """As `train.chunked_loss` has none; it says so."""
    name, machine = find("rtx4090")
    logits = {}
    for override in ("train.chunked_loss=false", "train.chunked_loss=true", LIGER):
        keys = ("device.kind=auto", "train.micro_batch=64", override)
        job = described(hf_job_of(tmp_path, "llama", *keys))
        plan = make(job, name, machine, 1, tracer_of(job, machine, 1))
        logits[override] = plan.device["logits and loss"]
        assert ("Liger: its loss is planned as train.chunked_loss" in report.text(plan)) == (
            override == LIGER
        )
    assert logits[LIGER] == logits["train.chunked_loss=true"] < logits["train.chunked_loss=false"]


@pytest.mark.slow
def test_of_several_modalities_the_language_model_is_trained(tmp_path: Path) -> None:
    """No update, and no weight decay, reaches the others, which are saved as they were."""
    job = hf_job_of(tmp_path, "gemma3", "optim.weight_decay=0.5", "offload.precision=fp32")
    assert run(job, tmp_path / "run") == 0
    planned = described(job).hf
    assert planned is not None and planned.parts is not None
    params = {param.name: param.trained for part in planned.parts for param in part.params}
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gemma3").state_dict()
    after = dict(open_saved(tmp_path / "run").weights())
    assert any(params.values()) and not all(params.values())
    for name, trained in params.items():
        assert trained == ("language_model" in name)
        assert torch.equal(after[name], before[name]) != trained, name


def test_a_plan_with_a_trace_leaves_the_dropout_of_adapters_as_it_is(tmp_path: Path) -> None:
    """PEFT draws adapters also of an empty model."""
    adapters = (LORA.replace("}", ", dropout = 0.1}"), "train.steps=2", "train.eval_every=0")
    histories = []
    for activation in ("keep", "offload_saved"):
        job = hf_job_of(tmp_path, "llama", *adapters, f"offload.activation={activation}")
        assert run(job, tmp_path / activation) == 0
        histories.append(history(tmp_path / activation))
    assert histories[0] == histories[1]


def test_random_weights_are_those_that_transformers_draws(tmp_path: Path) -> None:
    job = described(hf_job_of(tmp_path, "gpt2", "model.init=random", "offload.precision=bf16"))
    assert job.hf is not None
    model, optimizer = hf_job.build(
        job.hf,
        update_rule(job.optim),
        lambda module: decay_groups(module, job),
        job.offload,
        device=torch.device("cpu"),
        seed=7,
    )
    torch.manual_seed(7)
    config = transformers.AutoConfig.from_pretrained(job.hf.folder)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    masters = dict(optimizer.master_weights())
    for name, param in reference.named_parameters():
        assert torch.equal(masters[name], param), name
    assert model.module.training
    optimizer.close()


@pytest.mark.parametrize(
    "overrides",
    [
        (LORA, "offload.working=host"),
        pytest.param(("offload.state=int8",), marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_same_bits_from_a_moved_folder(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    job = hf_job_of(tmp_path, "llama", *overrides)
    assert run(job, tmp_path / "whole") == 0
    assert run(job, tmp_path / "parts", stop_after=2) == 75
    shutil.move(tmp_path / "llama", tmp_path / "elsewhere")
    moved = hf_job_of(tmp_path, "elsewhere", *overrides)
    assert run(moved, tmp_path / "parts", resume=str(tmp_path / "parts")) == 0
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    hashes = [tensor_hashes(tmp_path / name, 4) for name in ("whole", "parts")]
    assert hashes[0] == hashes[1]

    config = json.loads((tmp_path / "elsewhere" / "config.json").read_text())
    (tmp_path / "elsewhere" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    longer = hf_job_of(tmp_path, "elsewhere", *overrides, "train.steps=5")
    with pytest.raises(ConfigError, match=r"is of another model: its config.json is not that of"):
        run(longer, tmp_path / "parts", resume=str(tmp_path / "parts"))


def test_a_frozen_parameter_that_steps_change_is_saved_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between_steps, begin = Trainer._between_steps, Save.__init__
    changing: list[list[str]] = []

    def halve(trainer: Trainer) -> None:
        param = trainer._context.model.module.get_parameter(NORM)
        assert not param.requires_grad
        with torch.no_grad():
            param.mul_(0.5)
        between_steps(trainer)

    def record(writing: Save, *arguments: Any, **options: Any) -> None:
        changing.append(list(options["changing"]))
        begin(writing, *arguments, **options)

    assert run(job := hf_job_of(tmp_path, "llama", LORA), tmp_path / "plain") == 0
    monkeypatch.setattr(Trainer, "_between_steps", halve)
    monkeypatch.setattr(Save, "__init__", record)
    assert run(job, tmp_path / "changed") == 0
    assert changing and all(names == [NORM] for names in changing)
    hashes = [tensor_hashes(tmp_path / name, 4) for name in ("plain", "changed")]
    assert hashes[0] != hashes[1]


# ---- what becomes of it


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine-tuned")
    evaluated = ("train.eval_every=4", "train.eval_batches=1000", "train.sample_tokens=3")
    assert run(hf_job_of(folder, "llama", *evaluated), folder / "run") == 0
    return folder / "run"


def masters_of(path: Path) -> dict[str, Tensor]:
    return dict(open_saved(path).weights())


def test_a_run_is_exported_and_evaluated(
    fine_tuned: Path, tmp_path: Path, command: Command
) -> None:
    """Also where the model's folder is gone."""
    shutil.rmtree(fine_tuned.parent / "llama", ignore_errors=True)
    out = tmp_path / "out"
    assert main(["export", str(fine_tuned), str(out), "--dtype", "fp32"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    masters = masters_of(fine_tuned)
    assert {name for name, _ in model.named_parameters()} == masters.keys()
    for name, param in model.named_parameters():
        assert torch.equal(param, masters[name]), name
    assert transformers.AutoTokenizer.from_pretrained(out)("ab")["input_ids"] == [97, 98]

    (val,) = (fine_tuned.parent / "data").rglob("val.bin")
    trained = open_model(fine_tuned, torch.device("cpu"))
    logged = events_of(fine_tuned, schema.Eval)[-1]
    result = evaluate(trained, val, seq_len=32, batch=4, most_tokens=logged.tokens)
    assert result.loss == pytest.approx(logged.val_loss, rel=1e-6)
    assert "1 +" in command("generate", fine_tuned, "--prompt", "1 +", "--max-tokens", "4").out
    assert (
        "without adapters"
        in command("export", fine_tuned, tmp_path / "merged", "--merge", code=2).err
    )


def test_adapters_are_exported_alone_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    job = hf_job_of(tmp_path, "llama", LORA, "train.eval_every=0", "offload.precision=fp32")
    path, tokens = tmp_path / "run", torch.arange(20)[None]
    assert run(job, path) == 0
    for out, more in (("adapters", []), ("merged", ["--merge", "--dtype", "fp32"])):
        assert main(["export", str(path), str(tmp_path / out), *more]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().err
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    with torch.no_grad():
        before = base(tokens).logits
        loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
        adapted = loaded(tokens).logits
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        trained = open_model(path, torch.device("cpu")).model.module(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, adapted, rtol=1e-5, atol=1e-6)
    assert torch.equal(trained, adapted) and not torch.allclose(before, adapted, atol=1e-4)
    assert (
        "holds adapters without their base"
        in command("eval", tmp_path / "adapters", "--data", "x", code=2).err
    )
