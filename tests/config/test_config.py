"""Jobs: every bad input gets one clear sentence, and what was resolved loads back equal."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from math import inf, nan
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import OFFLOAD, Config
from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.config.offload import OPTIONS, STATE_PRECISIONS, OffloadConfig
from offloadtrain.config.sections import (
    DataConfig,
    DeviceConfig,
    LogConfig,
    OptimConfig,
    Packing,
    TrainConfig,
)
from offloadtrain.config.toml import converted
from tests import levels

JOB = """
name = "small"
[model]
size = "debug"
[data]
source = "python-stdlib"
seq_len = 128
[train]
steps = 100
"""


def problems(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        jobs.loads(text, "job.toml", overrides)
    return caught.value.problems


def job(*overrides: str) -> Config:
    return jobs.loads(JOB, "job.toml", overrides)


# ---- what is right


def test_defaults_and_sizes() -> None:
    small = job()
    assert small.name == "small" and small.model == SIZES["debug"]
    assert small.optim == OptimConfig() and small.device == DeviceConfig()
    assert small.offload == OFFLOAD.replace(grad_accum_steps=1, seed=1234)
    assert small.train == TrainConfig(steps=100)
    assert small.batch_tokens == 8 * 128


def test_a_size_may_be_varied_or_spelled_out() -> None:
    assert job("model.num_layers=7").model.num_layers == 7
    text = JOB.replace('size = "debug"', "vocab_size=50\nnum_layers=1\nd_model=32\nnum_heads=2")
    shape = jobs.loads(text).model
    assert shape == ModelShape(vocab_size=50, num_layers=1, d_model=32, num_heads=2)


OVERRIDES: dict[str, tuple[str, object]] = {
    "offload.clip_norm=2": ("offload.clip_norm", 2.0),
    "optim.lr=3e-4": ("optim.lr", 3e-4),
    "optim.betas=[0.8, 0.99]": ("optim.betas", (0.8, 0.99)),
    "optim.schedule=linear": ("optim.schedule", "linear"),
    'optim.schedule="linear"': ("optim.schedule", "linear"),
    "data.source=/a b/c=d.txt": ("data.source", "/a b/c=d.txt"),
    'data.source=/a "b"\\c': ("data.source", '/a "b"\\c'),
    "offload.pin_memory=false": ("offload.memory.pin", False),
    "train.steps=1_000": ("train.steps", 1000),
    " name = other ": ("name", "other"),
    "train={steps=7, seed=1}": ("train.steps", 7),
    "offload.host_memory_limit=24 GiB": ("offload.memory.host_limit", 24 << 30),
    "offload.host_memory_limit=25769803776": ("offload.memory.host_limit", 24 << 30),
    "train.checkpoint_spill=1 MiB": ("offload.memory.checkpoint_spill", 0),  # without saves
}


def test_an_override_sets_its_key_to_a_value_of_its_type() -> None:
    """The last of several overrides of a key wins; each sets only its key. The job loads back
    equal."""
    for override, (key, expected) in OVERRIDES.items():
        resolved = job(override)
        value = attrgetter(key)(resolved)
        assert (value, type(value)) == (expected, type(expected)), override
        assert jobs.loads(jobs.dump(resolved)) == resolved, override
    assert job("train.seed=1", "train.seed=2").train.seed == 2
    assert problems(JOB, "train.steps=1\noptim.lr=2") == (
        "--set: train.steps = '1\\noptim.lr=2' must be a whole number",
    )


def test_accumulation_follows_from_the_global_batch() -> None:
    resolved = job("train.global_batch_tokens=4096")
    assert resolved.train.grad_accum_steps == 4 and resolved.batch_tokens == 4096
    assert job("train.global_batch_tokens=4096", "train.grad_accum_steps=4") == resolved
    assert jobs.loads(jobs.dump(resolved), overrides=["train.micro_batch=16"]).train == (
        TrainConfig(steps=100, micro_batch=16, global_batch_tokens=4096, grad_accum_steps=2)
    )


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + JOB.encode())
    assert jobs.load(path, ["train.steps=5"]).train.steps == 5


# ---- what is wrong: (overrides of the good job, the whole sentence)

BAD_VALUES = [
    ("optim.lr=0", "optim.lr = 0.0 must be above 0"),
    ("optim.lr=inf", "optim.lr = inf must be a finite number"),
    ("optim.lr='1e-3'", "optim.lr = '1e-3' must be a finite number"),
    ("optim.betas=0.9", "optim.betas = 0.9 must be a list of 2 numbers"),
    ("optim.betas=[0.9]", "optim.betas = [0.9] must be a list of 2 numbers"),
    ("optim.betas=[0.9, 1]", "optim.betas = (0.9, 1.0) must be each from 0 to below 1"),
    ("optim.eps=1e-39", "optim.eps = 1e-39 must be at least 1.2e-38, the smallest number of fp32"),
    ("optim.weight_decay=-0.1", "optim.weight_decay = -0.1 must be 0 or more"),
    ("offload.clip_norm=-1", "offload.clip_norm = -1.0 is not positive"),
    ("optim.min_lr_ratio=1.5", "optim.min_lr_ratio = 1.5 must be from 0 to 1"),
    ("optim.warmup_steps=101", "optim.warmup_steps = 101 must be at most train.steps = 100"),
    ("optim.warmup_steps=1.0", "optim.warmup_steps = 1.0 must be a whole number"),
    (
        "optim.schedule=cosin",
        "optim.schedule = 'cosin' must be one of cosine, linear, constant; did you mean cosine?",
    ),
    (
        "optim.name=shampoo",
        "optim.name = 'shampoo' must be one of adamw, adam, lion, sgd, adagrad, lamb, muon",
    ),
    (
        "offload.state=int4",
        "offload.state = 'int4' is not one of 'fp32', 'split16', 'int8'; did you mean int8?",
    ),
    ("device.kind=gpu", "device.kind = 'gpu' must be one of auto, cpu, cuda; did you mean cpu?"),
    ("offload.device_slots=0", "offload.device_slots = 0 is not positive"),
    ("offload.resident_blocks=-1", "offload.resident_blocks = -1 is negative"),
    ("offload.zero_stage=4", "offload.zero_stage = 4 is not one of 0, 1, 2, 3"),
    ("offload.cast_inputs=1", "offload.cast_inputs = 1 must be true or false"),
    ("offload.keep_fp32=head", "offload.keep_fp32 = 'head' must be a list of strings"),
    (
        "offload.host_memory_limit=much",
        "offload.host_memory_limit = 'much' must be a size such as \"10 GiB\"",
    ),
    ("offload.pin_memory=yes", "offload.pin_memory = 'yes' must be true or false"),
    ("device.threads=-1", "device.threads = -1 must be 0 (as torch chooses) to 4096"),
    ("train.steps=0", "train.steps = 0 must be at least 1"),
    ("train.steps=1e3", "train.steps = 1000.0 must be a whole number"),
    (f"train.seed={2**63}", f"train.seed = {2**63} must be a whole number of at most 64 bits"),
    ("train.seed=-1", "train.seed = -1 must be 0 or more"),
    ("train.micro_batch=0", "train.micro_batch = 0 must be at least 1"),
    (
        "train.global_batch_tokens=1000",
        "train.global_batch_tokens = 1000 must be a multiple of train.micro_batch * "
        "data.seq_len = 8 * 128 = 1024",
    ),
    (
        "train.keep_last=1",
        "train.keep_last = 1 must be at least 2 (the newest may be damaged)",
    ),
    ("train.eval_batches=0", "train.eval_batches = 0 must be at least 1"),
    ("train.eval_every=-1", "train.eval_every = -1 must be 0 (never) or more"),
    ("train.checkpoint_every=-1", "train.checkpoint_every = -1 must be 0 (never) or more"),
    ("train.checkpoint_spill=-1", "train.checkpoint_spill = -1 must be 0 or more"),
    (
        "train.checkpoint_spill=much",
        "train.checkpoint_spill = 'much' must be a size such as \"10 GiB\"",
    ),
    (
        'log.to=["csv", "tensorbord"]',
        "log.to = ['csv', 'tensorbord'] must be one of csv, jsonl, tensorboard, wandb; did you "
        "mean tensorboard?",
    ),
    ("log.to=csv", "log.to = 'csv' must be a list of strings"),
    ("train.log_every_s=0", "train.log_every_s = 0.0 must be above 0"),
    ("train.sample_tokens=-1", "train.sample_tokens = -1 must be 0 or more"),
    ("train.sample_prompt=3", "train.sample_prompt = 3 must be a string, in quotes"),
    ("train.sample_prompt=\udcff", "train.sample_prompt = '\\udcff' must be valid UTF-8"),
    ("data.seq_len=1", "data.seq_len = 1 must be from 2 to 8388608"),
    ("data.seq_len=129", "data.seq_len = 129 must be at most model.max_seq_len = 128"),
    ("data.val_fraction=1", "data.val_fraction = 1.0 must be from 0 to below 1"),
    ("data.cache=", "data.cache = '' must be a path: not empty, printable"),
    ("data.source=a\0b", "data.source = 'a\\x00b' must be a printable path"),
    ("runs_dir=", "runs_dir = '' must be a path: not empty, printable"),
    (
        "name=../up",
        "name = '../up' must be 1 to 64 of the characters A-Z a-z 0-9 . _ - and begin with a "
        "letter or digit",
    ),
    ("model.num_heads=5", "model.d_model = 64 must be a multiple of num_heads = 5"),
    (
        "model.num_kv_heads=3",
        "model.num_heads = 4 must be a multiple of num_kv_heads = 3",
    ),
    ("model.dropout=1", "model.dropout = 1.0 must be in [0, 1)"),
    ("model=3", "model = 3 must be a table: [model]"),
    (
        "model.positions=alibi",
        "model.positions = 'alibi' must be one of rotary, learned",
    ),
]  # fmt: skip


def test_a_bad_value_is_reported_in_one_sentence() -> None:
    for override, sentence in BAD_VALUES:
        # A rule between two keys is reported for the key that the sentence begins with.
        origin = "--set" if sentence.startswith(override.split("=")[0]) else "job.toml"
        assert problems(JOB, override) == (f"{origin}: {sentence}",)


BAD_TOGETHER = [
    (["optim.name=sgd", "optim.momentum=-1"], "optim.momentum = -1.0 must be 0 or more"),
    (["optim.name=sgd", "optim.dampening=2"], "optim.dampening = 2.0 must be at most 1"),
    (["optim.name=adagrad", "optim.lr_decay=-1"], "optim.lr_decay = -1.0 must be 0 or more"),
    (
        ["optim.name=lion", "optim.momentum=0.5"],
        "optim.momentum = 0.5 is not used by optim.name = 'lion', only by sgd",
    ),
    (
        ["optim.name=sgd", "optim.betas=[0.8, 0.9]"],
        "optim.betas = (0.8, 0.9) is not used by optim.name = 'sgd', only by adamw, adam, lion",
    ),
    (
        ["optim.lr_decay=0.1"],
        "optim.lr_decay = 0.1 is not used by optim.name = 'adamw', only by adagrad",
    ),
    (
        ["optim.name=sgd", "optim.nesterov=true", "optim.dampening=0.1"],
        "optim.nesterov = true needs optim.momentum above 0 and optim.dampening = 0.0",
    ),
    (
        ["offload.activation=offload_saved", "ranks.tensor=2"],
        "offload.activation = 'offload_saved' with stages or parts "
        "(ranks.pipeline, ranks.tensor, ranks.expert)",
    ),
    *(
        (
            [f"optim.name={rule}", "model.num_experts=4", 'offload.skip_unused=["*.experts.*"]'],
            f"offload.skip_unused = ['*.experts.*'] and optim.name = '{rule}', which updates whole",
        )
        for rule in ("muon", "lamb")
    ),
    (["train.z_loss=0.1"], "train.z_loss = 0.1 needs train.chunked_loss = true"),
    (
        ["train.chunked_loss=true", "train.label_smoothing=1"],
        "train.label_smoothing = 1.0 must be from 0 to below 1",
    ),
    (
        ["data.varlen_attention=true"],
        'data.varlen_attention = true needs data.packing = "isolated"',
    ),
    (
        ["data.varlen_attention=true", "data.packing=isolated", "model.dropout=0.1"],
        "data.varlen_attention = true needs model.dropout = 0.0, not 0.1",
    ),
    (
        [
            *("data.varlen_attention=true", "data.packing=isolated"),
            "offload.activation=offload_saved",
        ],
        "data.varlen_attention = true does not go with ranks.pipeline, ranks.tensor or",
    ),
    (
        ["optim.name=muon", "offload.state=int8"],
        'offload.state = "int8" rounds masters and moments together, which optim.name = "muon"',
    ),
    (
        ["optim.name=muon", "offload.update=speculative"],
        'offload.update = "speculative" needs the gradient of a wrong guess again',
    ),
    (
        ["optim.adamw_lr=0.1"],
        "optim.adamw_lr = 0.1 is not used by optim.name = 'adamw', only by muon",
    ),
    (
        ["optim.name=adagrad", "offload.state=int8"],
        'offload.state = "int8" cannot keep the sum of optim.name = "adagrad"',
    ),
    (
        ["data.train=a.bin", "data.source=python-stdlib"],
        "data.source = 'python-stdlib' and data.train or data.val are both set; "
        "leave one of them out",
    ),
    (["data.source=''", "data.val=v.bin"], "data.train is missing: data.val is set"),
    (
        ["data.source=''", "data.train=a.bin", "data.chat_template=chat.jinja"],
        "data.chat_template is set, but is used only to prepare data.source",
    ),
    (["data.source=''"], "data.source is missing: a file or folder of text or records"),
    (
        ["data.source=''", "data.train=a.bin", "train.eval_every=5"],
        "data.val is missing: train.eval_every = 5 needs it",
    ),
    (
        ["data.val_fraction=0", "train.eval_every=5"],
        "data.val_fraction = 0.0 holds out nothing; train.eval_every must be 0 then",
    ),
    (
        ["train.sample_prompt=def"],
        "train.sample_prompt is set though train.sample_tokens = 0 samples nothing",
    ),
    (
        ["train.global_batch_tokens=4096", "train.grad_accum_steps=3"],
        "train.grad_accum_steps = 3 contradicts train.global_batch_tokens = 4096, which makes "
        "it 4; leave one of them out",
    ),
]


def test_a_contradiction_is_reported_in_one_sentence() -> None:
    for overrides, sentence in BAD_TOGETHER:
        (problem,) = problems(JOB, *overrides)
        assert problem.partition(": ")[2].startswith(sentence), overrides


def test_weights_of_the_shipped_transformer_have_one_dtype() -> None:
    """Its products refuse two in the first forward."""
    for precision in ("bf16", "auto"):
        norms = ["offload.keep_fp32=['*norm*']", f"offload.precision={precision}"]
        (problem,) = problems(JOB, *norms)
        assert "without model.hf" in problem and "set offload.precision = 'fp32'" in problem
    assert job(*norms, "offload.precision=fp32").offload.weights.keep_fp32 == ("*norm*",)


UNKNOWN_KEYS = [
    ("optim.lrr", "; did you mean lr? (known in [optim]: name, lr, betas, "),
    ("train.lr", "; did you mean optim.lr? (known in [train]: steps, micro_batch, "),
    ("train.step", "; did you mean steps? (known in [train]: steps, micro_batch, "),
    ("steps", "; did you mean train.steps? (known at the top: name, runs_dir, model, "),
    ("trian.seed", "; did you mean train.seed? (known at the top: name, runs_dir, model, "),
    ("trian.qqq", "; did you mean train? (known at the top: name, runs_dir, model, "),
    ("optim.state", "; did you mean offload.state? (known in [optim]: name, lr, betas, "),
    ("device.slots", "; did you mean offload.device_slots? (known in [device]: kind, threads, "),
    ("device.memory_limit", "; did you mean offload.device_memory_limit? (known in [device]: "),
    ("device.host_memory_limit", "; did you mean offload.host_memory_limit? (known in [device]"),
    (
        "ranks.zero_stage",
        "; did you mean offload.zero_stage? "
        "(known in [ranks]: pipeline, schedule, stages_per_rank, layers_per_stage, tensor, "
        "shard, expert)",
    ),
    (
        "optim.delay_warmup_steps",
        "; did you mean optim.warmup_steps or offload.warmup_steps? (known in [optim]: ",
    ),
    ("offload.seed", "; did you mean train.seed? (known in [offload]: precision, update, "),
    ("offload.grad_accum_steps", "; did you mean train.grad_accum_steps? (known in [offload]: "),
    ("model.szie", "; did you mean size? (known in [model]: size, vocab_size, "),
    ("data.qqq", " (known in [data]: source, tokenizer, form, "),
]


def test_an_unknown_key_comes_with_the_nearest_right_name() -> None:
    for key, rest in UNKNOWN_KEYS:
        (problem,) = problems(JOB, f"{key}=1")
        unknown = key.removesuffix(".qqq") if key.startswith("trian") else key
        assert problem.startswith(f"--set: {unknown} is unknown{rest}")


BAD_TEXTS = [
    ("", "job.toml: name is missing"),
    ("name = ", "job.toml: this is not valid TOML: Invalid value (at end of document)"),
    ("name = 'a'\nname = 'b'", "job.toml: this is not valid TOML: Cannot overwrite a value"),
    ("[train]\nsteps=1\n[train]\nseed=1", "job.toml: this is not valid TOML: Cannot declare"),
    (f"a = {'[' * 900}", "job.toml: this is not valid TOML"),
    (f"a = {'9' * 5000}", "job.toml: this is not valid TOML"),
    (JOB.replace("steps = 100", f"steps = 0x{'f' * 5000}"),
     "job.toml: train.steps = (a very large number) must be a whole number of at most 64 bits"),
    (JOB.replace("steps = 100", ""), "job.toml: train.steps is missing"),
    (JOB.replace("debug", "debgu"), "job.toml: model.size = 'debgu' must be one of debug, demo, "),
    (JOB.replace('"debug"', "7"), "job.toml: model.size = 7 must be one of debug, demo, "),
    (JOB.replace('size = "debug"', "d_model = 64"),
     "job.toml: model.vocab_size is missing (or name a whole shape: model.size = "),
    (JOB.replace("[train]", "[[train]]"), "job.toml: train = [{'steps': 100}] must be a table"),
    (JOB.replace('"small"', "2024-01-01"), "job.toml: name = datetime.date(2024, 1, 1) must be a "),
    (JOB + '"bad\\u001b[2J key" = 1', "job.toml: train.'bad\\x1b[2J_key' is unknown"),
]  # fmt: skip


BAD_OVERRIDES = {
    "optim.lr": "--set 'optim.lr': give section.key=value, for example optim.lr=3e-4",
    "=3": "--set '=3': give section.key=value, for example optim.lr=3e-4",
    "optim..lr=3": "--set 'optim..lr=3': give section.key=value, for example optim.lr=3e-4",
    "name.\x1b.x=3": "--set 'name.\\x1b.x=3': name is not a table",
    "optim.lr.x=3": "--set: optim.lr = {'x': 3} must be a finite number",
}


def test_a_bad_text_or_override_is_reported_in_one_sentence() -> None:
    for text, start in BAD_TEXTS:
        first = problems(text)[0]
        assert first.startswith(start) and first.isprintable()
    for override, sentence in BAD_OVERRIDES.items():
        assert problems(JOB, override) == (sentence,)
    (problem,) = problems(JOB, f"optim.name={'x' * 1000}")
    assert len(problem) < 200, "long values are cut"


LONG_JOB = """
name = "long"
[model]
size = "debug"
[data]
source = "corpus"
seq_len = 128
[optim]
warmup_steps = 700
[train]
steps = 20000
global_batch_tokens = 4096
eval_every = 500
sample_tokens = 300
sample_prompt = "def "
"""


OVERRIDDEN: list[tuple[list[str], list[str], dict[str, object]]] = [
    (
        ["train.steps=40"],
        ["optim.warmup_steps 700 -> 4 (train.steps = 40)"],
        {"optim.warmup_steps": 4, "train.steps": 40},
    ),
    (["train.steps=5"], ["optim.warmup_steps 700 -> 0 (train.steps = 5)"], {}),
    (["train.steps=700"], [], {"optim.warmup_steps": 700}),
    (["train.steps=40", "optim.warmup_steps=9"], [], {"optim.warmup_steps": 9}),
    (
        ["train.sample_tokens=0"],
        ["train.sample_prompt = 'def ' of the job is overridden by train.sample_tokens = 0"],
        {"train.sample_prompt": ""},
    ),
    (
        ["data.train=a.bin", "data.val=b.bin"],
        ["data.source = 'corpus' of the job is overridden by data.train = 'a.bin'"],
        {"data.source": "", "data.train": "a.bin"},
    ),
    (
        ["train.grad_accum_steps=2"],
        ["train.global_batch_tokens = 4096 of the job is overridden by train.grad_accum_steps = 2"],
        {"train.grad_accum_steps": 2, "train.global_batch_tokens": 0},
    ),
    (
        ["data.val_fraction=0"],
        ["train.eval_every = 500 of the job is overridden by data.val_fraction = 0"],
        {"train.eval_every": 0},
    ),
    (
        ["ranks.tensor=2"],
        [
            "train.sample_tokens = 300 of the job is overridden by ranks.tensor = 2",
            "train.sample_prompt = 'def ' of the job is overridden by ranks.tensor = 2",
        ],
        {"train.sample_tokens": 0, "train.sample_prompt": "", "ranks.tensor": 2},
    ),
    (["optim.lr=1e-4"], [], {"optim.warmup_steps": 700, "data.source": "corpus"}),
]
"""Overrides, the lines that they print, and values of the job afterwards."""


def test_a_machine_file_lies_next_to_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the command is called; of an override it lies where the command is called."""
    (tmp_path / "jobs").mkdir()
    job, machine = tmp_path / "jobs" / "job.toml", tmp_path / "jobs" / "mine.toml"
    job.write_text(f'{LONG_JOB}\n[device]\nmachine = "mine.toml"\n')
    monkeypatch.chdir(tmp_path)
    for path in (job, "jobs/job.toml"):
        resolved = jobs.load(path)
        assert resolved.device.machine == str(machine)
        (tmp_path / "resolved.toml").write_text(jobs.dump(resolved))
        assert jobs.load("resolved.toml") == resolved
    assert jobs.load(job, ["device.machine=mine.toml"]).device.machine == "mine.toml"
    assert jobs.load(job, ["device.machine=cpu2"]).device.machine == "cpu2"


def test_a_setting_of_the_file_that_an_override_contradicts_is_dropped_with_a_message() -> None:
    for overrides, expected, values in OVERRIDDEN:
        lines: list[str] = []
        resolved = jobs.loads(LONG_JOB, "job.toml", overrides, lines.append)
        assert lines == expected
        assert {key: attrgetter(key)(resolved) for key in values} == values
        lines.clear()
        assert jobs.loads(jobs.dump(resolved), "resolved.toml", [], lines.append) == resolved
        assert not lines


@pytest.mark.parametrize(
    ("option", "value", "override"),
    [
        ("loss_scale_hysteresis", 2, "offload.precision=bf16"),
        ("sums_down", "working", "offload.sums_on=host"),
        ("recompute_blocks", 3, "offload.activation=keep"),
        ("warmup_steps", 4, "offload.update=exact"),
    ],
)
def test_an_override_drops_options_of_the_file_that_need_another_value(
    option: str, value: object, override: str
) -> None:
    key, _, other = override.removeprefix("offload.").partition("=")
    needed = OPTIONS[option].needs
    assert needed is not None and needed.option == key
    table = f"[offload]\n{key} = {needed.values[0]!r}\n{option} = {value!r}\n"
    lines: list[str] = []
    job_of_file = jobs.loads(JOB + table, "job.toml")
    assert job_of_file.offload.value(option) == value
    changed = jobs.loads(JOB + table, "job.toml", [override], lines.append)
    assert changed.offload.options(changed=True).keys().isdisjoint({option})
    assert lines == [
        f"offload.{option} = {value!r} of the job is overridden by offload.{key} = {other!r}"
    ]
    # A resolved job has every key: its defaults contradict nothing, and no line names them.
    lines.clear()
    jobs.loads(jobs.dump(changed), "resolved.toml", [override], lines.append)
    assert not lines


def test_a_file_that_contradicts_itself_is_refused() -> None:
    (only,) = problems(LONG_JOB.replace("steps = 20000", "steps = 40"))
    assert only == "job.toml: optim.warmup_steps = 700 must be at most train.steps = 40"
    (only,) = problems(LONG_JOB, "optim.warmup_steps=900", "train.steps=800")
    assert only == "--set: optim.warmup_steps = 900 must be at most train.steps = 800"


def test_all_problems_are_reported_at_once_and_with_their_origin() -> None:
    text = JOB.replace("seq_len = 128", "seq_len = 1\nshuffle = true")
    reported = problems(text, "optim.lrr=1", "train.steps=x")
    assert [p.split(" ")[:2] for p in reported] == [
        ["job.toml:", "data.shuffle"],
        ["--set:", "optim.lrr"],
        ["--set:", "train.steps"],
    ]


def test_a_file_that_cannot_be_read_is_reported_with_the_reason(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "latin").write_bytes(b"name = '\xe9'")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    reasons = {
        "none.toml": "No such file or directory",
        "": "it is a folder, not a regular file",
        "fifo": "it is a FIFO, not a regular file",
        "latin": "it is not UTF-8 text: byte 8",
        "large": "it has 2,097,152 bytes, and at most 1,048,576 are read",
        "nul\0": "",
    }
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=f"cannot be read: {reason}"):
            jobs.load(tmp_path / name)


# ---- there and back


def _any_of(kind: Any) -> st.SearchStrategy[Any]:
    if get_origin(kind) is UnionType:
        return st.none() | _any_of(get_args(kind)[0])
    if get_args(kind)[1:] == (...,):
        return st.lists(_any_of(get_args(kind)[0])).map(tuple)
    if get_origin(kind) is tuple:
        return st.tuples(*map(_any_of, get_args(kind)))
    if get_args(kind):
        return st.sampled_from(get_args(kind))
    return {
        str: st.text(st.characters(codec="utf-8")),
        int: st.integers(1, 2**63 - 1),
        float: st.floats(1e-37, 0.999),
        bool: st.booleans(),
    }[kind]


def _section(cls: type, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{f.name: _any_of(hints[f.name]) for f in fields(cls)} | fixed)


def _offload(**fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[OffloadConfig]:
    options = {name: _any_of(option.kind) for name, option in OPTIONS.items()}
    return st.builds(OffloadConfig, **options | fixed)


_PRINTABLE = st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" ")
_PATHS = st.text(_PRINTABLE, min_size=1)
_NONE = st.just("")


_SHARES = st.floats(0, 0.5).map(lambda share: {"device": share, "host": 0.25})


def _tiers(update: str, working: str) -> st.SearchStrategy[Any]:
    named = ("auto", "host", "device") if working == "device" else ("auto", "host")
    lasting = ("disk", {"disk": 0.5}) if update != "speculative" else ()
    return st.sampled_from((*named, *lasting)) | _SHARES


_USED = {
    "adamw": {"betas", "eps"},
    "adam": {"betas", "eps"},
    "lion": {"betas"},
    "sgd": {"momentum", "dampening"},
    "adagrad": {"eps", "lr_decay"},
    "lamb": {"betas", "eps", "max_norm"},
    "muon": {"betas", "eps", "muon_momentum", "adjust_lr", "adamw_lr"},
}


@st.composite
def _optims(
    draw: st.DrawFn, state: str, state_on: Any, update: str, steps: int, skips_unused: bool
) -> OptimConfig:
    refused = {"adagrad", "muon"} if state == "int8" else set()
    refused |= {"muon"} if state == "split16" and state_on != "host" else set()
    refused |= {"muon"} if update == "speculative" else set()
    refused |= {"lamb", "muon"} if skips_unused else set()
    name = draw(st.sampled_from(sorted(_USED.keys() - refused)))
    unused = set.union(*_USED.values()) - _USED[name] | {"nesterov"}
    defaults = {key: st.just(getattr(OptimConfig(), key)) for key in unused}
    warmup = st.integers(0, steps)
    return draw(_section(OptimConfig, name=st.just(name), warmup_steps=warmup, **defaults))


@st.composite
def _configs(draw: st.DrawFn) -> Config:
    steps, micro_batch, count = (draw(st.integers(1, 10**6)) for _ in range(3))
    seq_len = draw(st.integers(2, 10**4))
    accumulation = draw(
        st.sampled_from(((count, micro_batch * seq_len * count), (draw(st.integers(1, 99)), 0)))
    )
    files = draw(st.tuples(_PATHS, _NONE, _NONE) | st.tuples(_NONE, _PATHS, _PATHS))
    data = dict(zip(("source", "train", "val"), map(st.just, files), strict=True))
    data |= {"tokenizer": _PATHS | _NONE, "field": _PATHS}
    data["chat_template"] = _PATHS | _NONE if files[0] else _NONE
    formats = [
        (state, kind) for state, kinds in STATE_PRECISIONS.items() for kind in (*kinds, "auto")
    ]
    state, precision = draw(st.sampled_from(formats))
    update = draw(st.sampled_from(("exact", "speculative", "delayed")))
    on_disk = ("disk",) if update != "speculative" else ()
    working = draw(st.sampled_from(("device", "host", *on_disk)))
    skips = precision == "fp16" or draw(st.booleans())
    state_on = draw(_tiers(update, working))
    gradients = ("disk",) if "disk" in state_on and update == "exact" else ()
    sums_on = draw(st.sampled_from(("host", "device", {"device": 0.4})))
    modes = ("keep", "recompute", "selective", "offload", "offload_saved")
    activation = draw(st.sampled_from(modes))
    above = st.integers(0, 1 << 30) if activation == "offload_saved" else st.just(1 << 20)
    recomputes = activation in ("recompute", "selective", "offload")
    compiled = draw(st.booleans())
    has_budget = compiled and activation in ("selective", "offload_saved")
    again = st.sampled_from((None, 0, 9, "auto")) if recomputes else st.none()
    offload = {
        "precision": st.just(precision),
        "fp8": st.sampled_from(("off", "rowwise") if precision == "bf16" else ("off",)),
        "state": st.just(state),
        "state_on": st.just(state_on),
        "scratch_dir": st.none() | _PATHS if "disk" in (working, *state_on) else st.none(),
        "grad_on": st.sampled_from(("host", *gradients)),
        "sums_on": st.just(sums_on),
        "sums_down": st.sampled_from(("fp32", "working") if sums_on != "host" else ("fp32",)),
        "update": st.just(update),
        "warmup_steps": st.integers(0, 9 if update == "delayed" else 0),
        "skip_nonfinite": st.just(skips),
        "loss_scale_hysteresis": st.integers(1, 9 if precision == "fp16" else 1),
        "working": st.just(working),
        "resident_blocks": st.none() | st.integers(0, 9 if working != "device" else 0),
        "zero_stage": st.integers(0, 3),
        "keep_whole": st.just(()) | st.tuples(_PATHS) if working == "host" else st.just(()),
        "keep_fp32": st.just(()) | st.tuples(_PATHS) if precision == "fp32" else st.just(()),
        "partition_activations": st.just(False),
        "activation": st.just(activation),
        "recompute_blocks": again,
        "activation_policy": st.none(),
        "compile_blocks": st.just(compiled),
        "activation_budget": st.none() | (st.floats(0, 1) if has_budget else st.none()),
        "offload_saved_above": above,
    }
    chunked = draw(st.booleans())
    packing = draw(st.sampled_from(get_args(Packing)))
    samples = draw(st.integers(0, 3))
    of_encoders = ("mlm",) if packing != "padded" and not samples else ()
    varlen = packing == "isolated" and activation != "offload_saved" and draw(st.booleans())
    data |= {"packing": st.just(packing), "varlen_attention": st.just(varlen)}
    undropped: dict[str, Any] = {"dropout": st.just(0.0)} if varlen else {}
    options = draw(_offload(**offload))
    return Config(
        name=draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")),
        runs_dir=draw(_PATHS),
        model=draw(
            _section(
                ModelShape,
                vocab_size=st.integers(1, 1 << 24),
                num_layers=st.integers(1, 1024),
                d_ff=st.integers(0, 10**6),
                d_model=st.just(96),
                num_heads=st.just(12),
                num_kv_heads=st.sampled_from((0, 4)),
                max_seq_len=st.integers(seq_len, 10**5),
                num_experts=st.sampled_from((0, 2, 8)),
                experts_per_token=st.integers(1, 2),
                objective=st.sampled_from(("causal", *of_encoders)),
                **undropped,
            )
        ),
        data=draw(_section(DataConfig, cache=_PATHS, seq_len=st.just(seq_len), **data)),
        optim=draw(_optims(state, state_on, update, steps, bool(options.skip_unused))),
        offload=options,
        device=draw(
            _section(
                DeviceConfig,
                threads=st.integers(0, 4096),
                machine=_PATHS | _NONE,
                process_memory_limit=st.sampled_from(("", "10 GiB")),
            )
        ),
        log=draw(_section(LogConfig)),
        train=draw(
            _section(
                TrainConfig,
                steps=st.just(steps),
                on_spike=st.sampled_from(("report", "skip") if skips else ("report",)),
                micro_batch=st.just(micro_batch),
                grad_accum_steps=st.just(accumulation[0]),
                global_batch_tokens=st.just(accumulation[1]),
                keep_last=st.integers(2, 100),
                on_alert=st.just(()) | st.tuples(_PATHS, _PATHS),
                on_end=st.just(()) | st.tuples(_PATHS),
                chunked_loss=st.just(chunked),
                label_smoothing=st.floats(0, 0.99) if chunked else st.just(0.0),
                z_loss=st.floats(0, 10) if chunked else st.just(0.0),
                sample_tokens=st.just(samples),
                sample_prompt=_PATHS | _NONE if samples else _NONE,
            )
        ),
    )


@levels.examples(100)
@given(_configs())
def test_a_dumped_job_loads_back_equal(resolved: Config) -> None:
    text = jobs.dump(resolved)
    assert jobs.loads(text) == resolved
    assert jobs.dump(jobs.loads(text)) == text


NO_NUMBERS: list[object] = [True, "1", None, [1], {}, nan, inf, 10**400]
NO_WHOLE_NUMBERS: list[object] = [True, False, "1", None, 1.0, [1], 2**63]


def test_no_value_of_another_type_is_accepted_for_a_number() -> None:
    for value in NO_NUMBERS:
        with pytest.raises(ValueError, match="number"):
            converted(float, value)
    for value in NO_WHOLE_NUMBERS:
        with pytest.raises(ValueError, match="whole number"):
            converted(int, value)


def test_every_shipped_job_resolves_and_loads_back_equal() -> None:
    paths = sorted((Path(jobs.__file__).parent.parent / "cli" / "jobs").glob("*.toml"))
    assert len(paths) >= 6
    for path in paths:
        resolved = jobs.load(path)
        assert jobs.loads(jobs.dump(resolved)) == resolved, path.name


@pytest.mark.parametrize("value", [None, [], "x", -1, True], ids=ascii)
def test_a_record_of_a_job_gains_the_keys_of_later_versions(value: object) -> None:
    """What a damaged record has in place of a section stays, for the caller to compare."""
    tables = jobs.as_tables(job())
    earlier = tables | {"data": {k: v for k, v in tables["data"].items() if k != "packing"}}
    assert earlier != tables == jobs.with_defaults(earlier)
    for name in tables:
        assert jobs.with_defaults(tables | {name: value})[name] == value


STATES_WITHOUT = [
    ("split16", "fp16", "does not fit in 16 bits. Use state = 'int8' or 'fp32', or precision ="),
    ("split16", "fp32", "its 16-bit working weight, but precision is 'fp32': use state ="),
    ("int8", "fp32", "use state = 'fp32', or precision = 'bf16'"),
]


def test_a_state_that_the_precision_cannot_have_is_refused() -> None:
    for state, precision, sentence in STATES_WITHOUT:
        (problem,) = problems(JOB, f"offload.state={state}", f"offload.precision={precision}")
        assert problem.startswith(f"--set: offload.state = '{state}' ") and sentence in problem


# ---- [offload]: the options of `offload()`, by the same names


def test_zero_is_none_and_none_is_left_out() -> None:
    for key in ("clip_norm", "host_memory_limit", "device_memory_limit"):
        assert job(f"offload.{key}=0").offload.value(key) is None
    assert "clip_norm = 0\n" in jobs.dump(job("offload.clip_norm=0"))
    text = jobs.dump(job())
    for key in ("resident_blocks", "cast_inputs", "host_memory_limit", "device_memory_limit"):
        assert f"{key} =" not in text
    resident = job("offload.resident_blocks=0", "offload.working=host")
    assert "resident_blocks = 0" in jobs.dump(resident)


def test_batches_and_seed_are_those_of_the_run() -> None:
    """Also of a job that was changed after it was loaded."""
    loaded = job("train.global_batch_tokens=4096", "train.seed=7")
    assert (loaded.offload.grad_accum_steps, loaded.offload.state.seed) == (4, 7)
    changed = replace(loaded, train=replace(loaded.train, grad_accum_steps=3))
    assert (changed.offload.grad_accum_steps, changed.offload.state.seed) == (3, 7)
    assert jobs.as_tables(loaded)["offload"].keys().isdisjoint({"seed", "grad_accum_steps"})
