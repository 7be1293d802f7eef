"""Small runs of commit 84537982: their jobs, and their folders as that commit left them.

An archive `runs/NAME.tar.xz` holds the folder NAME with

    job.toml        the job as its user wrote it
    run/            the run folder, of a run that was stopped or killed after a checkpoint
    expected.json   what that commit made of the folder: see `record`

`runs/inputs.tar.xz` holds what the jobs read, and `runs/programs.tar.xz` the rest: see `record`.
Paths in them are relative to the folder that they are unpacked in.
"""

from __future__ import annotations

import json
import signal
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHIVES = Path(__file__).parent / "runs"

BASE: dict[str, dict[str, Any]] = {
    "model": {
        **{"vocab_size": 257, "num_layers": 2, "d_model": 8, "num_heads": 2, "d_ff": 16},
        **{"max_seq_len": 32, "tie_embeddings": True, "dropout": 0.1},
    },
    "data": {"train": "tokens/train.bin", "val": "tokens/val.bin", "seq_len": 16},
    "optim": {"lr": 1e-2, "warmup_steps": 2},
    "offload": {"precision": "bf16"},
    "device": {"kind": "cpu", "threads": 1},
    "train": {"steps": 8, "micro_batch": 4, "grad_accum_steps": 2, "log_every_s": 1000.0},
}
"""The tables of a job that trains in a second; all other keys have their defaults."""


@dataclass(frozen=True, slots=True)
class GoldenRun:
    """A run that is stopped before its end.

    Attributes:
        changes: keys of the job that differ from `BASE`, by their full names; the name of a section
            replaces all of it.
        ranks: number of processes.
        stop: the signal that ends the run; SIGTERM saves a checkpoint first.
        stop_after: the step after which the signal comes.
        converts: `offloadtrain convert --to torch` takes its checkpoints.
        exports: `offloadtrain export` does.
        evaluates: the commit evaluated it, and generated text from it. It could not where a model
            of transformers has a tied head, whose weights it left unset.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    stop: signal.Signals = signal.SIGTERM
    stop_after: int = 4
    converts: bool = True
    exports: bool = True
    evaluates: bool = True

    def tables(self, name: str) -> dict[str, Any]:
        """Return the tables of the job."""
        tables: dict[str, Any] = {"name": name, **{key: dict(of) for key, of in BASE.items()}}
        for key, value in self.changes.items():
            section, _, name_in_section = key.partition(".")
            if name_in_section:
                tables.setdefault(section, {})[name_in_section] = value
            else:
                tables[section] = value
        return tables


_DEEP = {"model.num_layers": 4}
_UNTIED = {**_DEEP, "model.tie_embeddings": False}
_EXPERTS = {"model.num_experts": 4, "optim.betas": [0.8, 0.9]}
_HF = {"model": {"hf": "llama"}}

RUNS: dict[str, GoldenRun] = {
    "scheduled": GoldenRun(
        {
            **{"train.eval_every": 2, "train.checkpoint_every": 3, "train.eval_batches": 4},
            **{"train.sample_tokens": 8, "train.sample_prompt": "1 + ", "log.to": ["csv", "jsonl"]},
            **{"optim.schedule": "linear", "optim.min_lr_ratio": 0.2, "optim.decay": "all"},
        }
    ),
    "killed": GoldenRun(
        {
            **{"offload.state": "split16", "offload.update": "speculative"},
            **{"train.checkpoint_every": 3, "train.grad_accum_steps": 1},
        },
        stop=signal.SIGKILL,
        stop_after=5,
    ),
    "delayed": GoldenRun(
        {"offload.state": "int8", "offload.update": "delayed", "offload.warmup_steps": 1}
    ),
    "streamed": GoldenRun(
        {
            **{**_DEEP, "offload.precision": "fp16", "offload.working": "host"},
            **{"offload.activation": "recompute", "offload.recompute_blocks": 3},
            **{"offload.loss_scale_hysteresis": 2, "offload.resident_blocks": 1},
        }
    ),
    "disk": GoldenRun(
        {
            **{**_DEEP, "offload.state_on": "disk", "offload.grad_on": "disk"},
            **{"offload.working": "disk", "offload.state": "split16", "optim.name": "adam"},
        }
    ),
    "muon": GoldenRun(
        {
            **{"optim.name": "muon", "optim.adjust_lr": "match_rms_adamw"},
            **{"offload.activation": "offload_saved", "offload.offload_saved_above": 64},
        },
        converts=False,
    ),
    "shares": GoldenRun(
        {
            **{**_DEEP, "offload.state_on": {"device": 0.3, "disk": 0.3}, "optim.name": "lion"},
            **{"offload.sums_on": "device", "offload.sums_down": "working"},
            **{"offload.clip_norm": 0.0, "offload.skip_nonfinite": False},
        },
        converts=False,
    ),
    "experts": GoldenRun(
        {
            **{**_EXPERTS, "offload.precision": "fp32", "train.chunked_loss": True},
            **{"train.label_smoothing": 0.1, "data.packing": "isolated", "train.seed": 7},
            **{"offload.activation": "offload"},
        }
    ),
    "encoder": GoldenRun(
        {
            **{"model.objective": "mlm", "model.vocab_size": 258, "model.positions": "learned"},
            **{"model.norm": "layernorm", "model.mlp": "gelu", "model.bias": True},
            **{"optim.name": "lamb", "offload.state": "fp32"},
        },
        converts=False,
        exports=False,
    ),
    "fine_tuned": GoldenRun(
        {**_HF, "offload.state": "split16", "offload.working": "host"}, evaluates=False
    ),
    "adapters": GoldenRun(
        {
            "model": {
                "hf": "llama",
                "lora": {"r": 2, "alpha": 4.0, "dropout": 0.1, "target_modules": ["q_proj"]},
            }
        },
        evaluates=False,
    ),
    "sharded": GoldenRun(
        {**_DEEP, "offload.zero_stage": 3, "offload.working": "host", "offload.state": "int8"},
        ranks=2,
    ),
    "pipeline": GoldenRun(
        {
            **{**_UNTIED, "ranks.pipeline": 2, "ranks.schedule": "2bw"},
            **{"offload.update": "delayed", "train.grad_accum_steps": 4},
        },
        ranks=2,
    ),
    "tensor_parts": GoldenRun({"ranks.tensor": 2, "train.checkpoint_every": 3}, ranks=2),
    "expert_parts": GoldenRun({**_EXPERTS, "ranks.expert": 2}, ranks=2),
}


JOBS: dict[str, GoldenRun] = {
    "sgd_of_records": GoldenRun(
        {
            **{"optim.name": "sgd", "optim.momentum": 0.8, "optim.dampening": 0.1},
            **{"data.source": "records.jsonl", "data.train": "", "data.val": ""},
            **{"data.tokenizer": "tokenizer.json", "data.form": "chat", "data.field": "body"},
            **{
                "data.chat_template": "chat.jinja",
                "data.cache": "prepared",
                "runs_dir": "elsewhere",
            },
            **{"log.to": ["wandb"], "log.project": "golden", "train.checkpoint_every": 5},
            **{"train.keep_last": 3, "train.keep_every": 10, "train.checkpoint_spill": "1 MiB"},
            **{"train.on_spike": "rollback", "train.spike_score": 9.0, "train.max_rollbacks": 5},
        }
    ),
    "nesterov_with_commands": GoldenRun(
        {
            **{"optim.name": "sgd", "optim.nesterov": True, "train.hang_timeout_s": 30.0},
            **{"train.on_alert": ["notify", "alert"], "train.on_end": ["notify", "end"]},
            **{"train.deterministic": True, "device.process_memory_limit": "1 GiB"},
            **{"device.placement": "auto", "offload.device_memory_limit": "1 GiB"},
            **{"offload.host_memory_limit": "2 GiB", "offload.pin_memory": False},
        }
    ),
    "adagrad_on_the_disk": GoldenRun(
        {
            **{"optim.name": "adagrad", "optim.lr_decay": 0.01, "offload.state_on": "disk"},
            **{"offload.scratch_dir": "scratch", "offload.scratch_in_memory": True},
            **{"offload.compile_blocks": True, "offload.cast_inputs": False},
            **{"model.num_kv_heads": 1, "model.rope_theta": 5e5, "model.norm_eps": 1e-6},
        }
    ),
    "lamb_in_shards": GoldenRun(
        {
            **{"optim.name": "lamb", "optim.max_norm": 10.0, "offload.zero_stage": 3},
            **{"offload.keep_whole": ["head"], "offload.reduction": "fp32", "ranks.shard": 2},
            **{"offload.working": "host", "offload.device_slots": 3},
        }
    ),
    "muon_of_experts": GoldenRun(
        {
            **{"optim.name": "muon", "optim.adamw_lr": 1e-3, "optim.muon_momentum": 0.9},
            **{"model.num_experts": 4, "model.experts_per_token": 1},
            **{"model.router_aux_loss_coef": 0.1, "train.chunked_loss": True, "train.z_loss": 1e-4},
        }
    ),
    "interleaved": GoldenRun(
        {
            **{"model.num_layers": 8, "model.tie_embeddings": False, "ranks.pipeline": 2},
            **{"ranks.schedule": "interleaved", "ranks.stages_per_rank": 2},
            **{"ranks.layers_per_stage": [2, 2, 2, 2], "train.grad_accum_steps": 4},
        }
    ),
    "parts_of_inputs": GoldenRun(
        {
            **{"model": {"hf": "llama"}, "offload.activation": "recompute"},
            **{"offload.partition_activations": True, "offload.keep_fp32": ["*norm*"]},
        }
    ),
    "partly_used": GoldenRun({"model": {"hf": "llama"}, "offload.skip_unused": ["*mlp*"]}),
}
"""Jobs that are only read: together with the others they set every key."""


def unpack(name: str, folder: Path) -> Path:
    """Unpack a run and what it reads into `folder`; return the folder of the run."""
    for archive in ("inputs", name):
        with tarfile.open(ARCHIVES / f"{archive}.tar.xz") as file:
            file.extractall(folder, filter="data")
    return folder / name


def expected(folder: Path) -> dict[str, Any]:
    """Return what the commit made of an unpacked run."""
    values: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return values
