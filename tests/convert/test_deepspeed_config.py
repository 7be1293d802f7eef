"""DeepSpeed's classic configurations as jobs and as options of the mixin; nothing gets lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job
from offloadtrain.convert import deepspeed_config
from offloadtrain.convert.deepspeed_config import Imported
from tests.conftest import Command

SIZES = {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "sub_group_size": 1e9}
ZERO2: dict[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 50}
        | {"total_num_steps": 1000, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        **SIZES,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.3,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
ZERO3: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000}
    | {"initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
SET = """
[model]
size = "demo"
[data]
source = "python-stdlib"
"""
SCRIPT = """
args = SFTConfig(
    output_dir=str(folder), learning_rate=2e-5, adam_beta1=0.8, adam_beta2=0.95,
    bf16=True, fp16=False, max_grad_norm=0.7, per_device_train_batch_size=4,
    warmup_steps=10, max_steps=100,
)
"""


def imported(config: dict[str, Any], folder: Path, arguments: str | None = None) -> Imported:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    if arguments is None:
        return deepspeed_config.load(path, None)
    script = folder / ("args.py" if "(" in arguments else "args.json")
    script.write_text(arguments)
    return deepspeed_config.load(path, script)


NVME = {"device": "nvme", "nvme_path": "/nvme"}


def changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Keys with dots, written as `a__b`."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        *sections, last = key.split("__")
        table = config
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
    return config


def test_zero_2_with_offload(tmp_path: Path) -> None:
    result = imported(ZERO2, tmp_path)
    made = job.loads(result.job() + SET)
    assert (
        made.offload.sharding.zero_stage,
        made.offload.state.tier,
        made.offload.weights.tier,
    ) == (
        2,
        "host",
        "device",
    )
    assert (made.offload.precision, made.offload.clip_norm) == ("bf16", 0.3)
    assert (made.train.micro_batch, made.train.grad_accum_steps, made.train.steps) == (2, 4, 1000)
    optim = made.optim
    assert (optim.name, optim.lr, optim.betas, optim.eps) == ("adamw", 3e-5, (0.8, 0.999), 1e-8)
    assert (optim.weight_decay, optim.warmup_steps) == (3e-7, 50)
    assert (optim.schedule, optim.min_lr_ratio) == ("linear", 0.0)
    assert set(result.unmapped) == {
        *(f"zero_optimization.{key}" for key in SIZES),
        "zero_optimization.overlap_comm",
        "train_batch_size",
        "steps_per_print",
        "wall_clock_breakdown",
    }
    assert not result.undecided


def test_zero_3_with_auto_and_a_script(tmp_path: Path) -> None:
    result = imported(ZERO3, tmp_path, SCRIPT)
    made = json.loads(result.mixin())
    assert made["offload"] == {
        "zero_stage": 3,
        "state_on": "host",
        "pin_memory": True,
        "working": "host",
    }
    assert made["training_arguments"] == {
        "bf16": True,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "constant_with_warmup",
        "learning_rate": 2e-5,
        "warmup_steps": 10,
        "max_grad_norm": 0.7,
        "per_device_train_batch_size": 4,
        "max_steps": 100,
    }
    assert set(result.undecided) == {"optimizer.params.eps"}
    assert "not a literal" in result.unmapped["arguments.output_dir"]
    assert "linear" in result.unmapped["scheduler.params.warmup_type"]
    assert "2^16" in result.unmapped["fp16.hysteresis"]
    assert {"fp16.loss_scale_window", "fp16.min_loss_scale"} < set(result.unmapped)


def test_every_key_is_mapped_or_listed(tmp_path: Path) -> None:
    """Of each key alone: the job changes, or the key is in a list."""
    nothing = imported({}, tmp_path)
    for name, value in deepspeed_config._leaves(ZERO2):
        result = imported(changed({}, **{name.replace(".", "__"): value}), tmp_path)
        listed = name in result.unmapped
        agrees = value in (0, True) or name.endswith(("warmup_type", "offload_optimizer.device"))
        assert listed or result.tables != nothing.tables or agrees, name


def test_what_a_tier_or_leaving_it_out_means(tmp_path: Path) -> None:
    cpu = {"device": "cpu"}
    keys = ("state_on", "working", "zero_stage", "precision")
    cases: list[tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]] = [
        ({"stage": 1}, {}, ("device", None, 1, "fp32")),
        ({"cpu_offload": True}, {}, ("host", None, None, "fp32")),
        ({"offload_optimizer": NVME}, {}, ("disk", None, None, "fp32")),
        ({"offload_param": cpu}, {"fp16": {"enabled": True}}, ("host", "host", None, "fp16")),
        (
            {"offload_optimizer": NVME, "offload_param": NVME, "stage": 3},
            {},
            ("disk", "disk", 3, "fp32"),
        ),
    ]
    for zero, rest, expected in cases:
        options = imported({"zero_optimization": zero, **rest}, tmp_path).tables["offload"]
        assert tuple(options.get(key) for key in keys) == expected
    for part in ("offload_optimizer", "offload_param"):  # the path of the state is that of a drive
        for device, path in (("nvme", "/nvme"), ("cpu", None)):
            zero = {part: {**NVME, "device": device}, "stage": 3}
            result = imported({"zero_optimization": zero}, tmp_path)
            assert result.tables["offload"].get("scratch_dir") == path
            assert f"zero_optimization.{part}.nvme_path" not in result.unmapped


def test_adam_is_adamw_unless_the_mode_is_off(tmp_path: Path) -> None:
    adam = changed(ZERO2, optimizer__type="Adam")
    assert imported(adam, tmp_path).tables["optim"]["name"] == "adamw"
    result = imported(changed(adam, optimizer__params__adam_w_mode=False), tmp_path)
    assert result.tables["optim"]["name"] == "adam"
    result.mixin()
    assert "optimizer_cls_and_kwargs" in result.unmapped["optim.name"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command) -> None:
    path, out = tmp_path / "ds.json", tmp_path / "job.toml"
    path.write_text(json.dumps(ZERO2))
    assert command("import-deepspeed", path, out).err.count("not mapped: ") == 7
    assert main(["import-deepspeed", str(path), str(out)]) != 0
    assert "cannot be written" in capsys.readouterr().err
    assert (
        json.loads(command("import-deepspeed", path, "--to", "mixin").out)["offload"]["zero_stage"]
        == 2
    )
    path.write_text("[]")
    assert main(["import-deepspeed", str(path)]) != 0
