"""Checkpoints as torch, FSDP and DeepSpeed lay them out, of any model and its AdamW."""

from __future__ import annotations

import enum
import io
import pickle
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

Adam = torch.optim.Optimizer

KINDS = ("master", "exp_avg", "exp_avg_sq")


class Toy(nn.Module):
    """Sizes that no number of ranks divides, tied weights, a frozen layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(7, 5, bias=False)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(self.norm(self.first(x)))
        return out


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]


def trained_toy(steps: int = 3) -> tuple[Toy, Adam]:
    torch.manual_seed(0)
    model = Toy()
    adam = torch.optim.AdamW(groups_of(model), lr=1e-2, fused=True)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        adam.step()
        adam.zero_grad()
    return model, adam


def state_of(model: nn.Module, adam: Adam) -> dict[str, dict[str, Tensor]]:
    """Name → master and moments, of what was trained."""
    return {
        name: {"master": param.detach(), **{kind: adam.state[param][kind] for kind in KINDS[1:]}}
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def save_torch(path: Path, model: nn.Module, adam: Adam, **more: Any) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), **more}, path)
    return path


def save_dcp(folder: Path, model: nn.Module, adam: Adam, *, flat: bool) -> Path:
    """As `get_state_dict` of a model under FSDP lays it out, of one rank."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, optimizer = get_state_dict(model, adam, options=options)
    with warnings.catch_warnings(action="ignore"):  # one process is what is meant
        dcp.save({"model": weights, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
    return folder


def split_dcp(folder: Path) -> Path:
    """Cut every tensor in two along its first dimension, as two ranks under FSDP2 save it."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / "__1_0.distcp").open("wb") as file:
        for key, entry in index.state_dict_metadata.items():
            if not getattr(entry, "chunks", None) or not entry.size or entry.size[0] < 2:
                continue
            (unsplit,) = (at for at in index.storage_data if at.fqn == key)
            info = index.storage_data.pop(unsplit)
            content = (folder / info.relative_path).read_bytes()
            part = content[info.offset : info.offset + info.length]
            value = torch.load(io.BytesIO(part), weights_only=True)
            entry.chunks.clear()
            for begin, half in zip((0, 1), (value[:1], value[1:]), strict=True):
                offsets = torch.Size([begin] + [0] * (value.ndim - 1))
                entry.chunks.append(ChunkStorageMetadata(offsets, half.shape))
                at = file.tell()
                torch.save(half.clone(), file)
                place = _StorageInfo("__1_0.distcp", at, file.tell() - at)
                index.storage_data[MetadataIndex(key, offsets)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


class _Stage(int, enum.Enum):
    ONE, TWO, THREE = 1, 2, 3


class _LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


@dataclass
class _Fragment:
    numel: int
    start: int


@contextmanager
def _deepspeed_names() -> Iterator[None]:
    """Pickle classes by the names that they have in DeepSpeed."""
    named = {
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _Stage,
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): _LossScaler,
        ("deepspeed.utils.tensor_fragment", "fragment_address"): _Fragment,
    }
    modules = {}
    for (module, name), kind in named.items():
        kind.__module__, kind.__qualname__, kind.__name__ = module, name, name
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            modules.setdefault(path, types.ModuleType(path))
        setattr(modules[module], name, kind)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for path in modules:
            del sys.modules[path]


def save_zero(
    folder: Path, model: nn.Module, adam: Adam, *, stage: int, ranks: int, bf16: bool = False
) -> Path:
    """As DeepSpeed 0.19 does: `stage_1_and_2.py` and `stage3.py`, `_save_checkpoint` of the
    engine.

    Args:
        bf16: as `bf16_optimizer.py`, which names no stage and saves masters with padding.
    """
    folder.mkdir(parents=True)
    groups = _named_groups(model, adam)
    state = state_of(model, adam)
    step = next(iter(adam.state.values()))["step"]
    with _deepspeed_names():
        for rank in range(ranks):
            part = _stage_3(groups, state, ranks, rank) if stage == 3 else {}
            if stage < 3:
                part = _stages_1_and_2(groups, state, ranks, rank)
            flats, optimizer = part.pop("flats"), part.pop("optimizer")
            entries = {
                at: {"step": step, "exp_avg": avg, "exp_avg_sq": square}
                for at, (_, avg, square) in enumerate(flats)
            }
            hyper = [
                {k: v for k, v in group.items() if k != "params"} | {"params": indices}
                for group, indices in zip(adam.param_groups, part.pop("indices"), strict=True)
            ]
            part[optimizer] = {"state": entries, "param_groups": hyper}
            part |= {
                "loss_scaler": _LossScaler(),
                "dynamic_loss_scale": False,
                "overflow": False,
                "zero_stage": _Stage(stage),
                "partition_count": ranks if stage == 3 else [ranks] * len(groups),
            }
            if bf16:
                del part["zero_stage"], part["loss_scaler"], part["dynamic_loss_scale"]
                part["single_partition_of_fp32_groups"] = [flat[0] for flat in flats]
            facts = {"ds_config": {"zero_optimization": {"stage": stage}}, "ds_version": "0.19.5"}
            torch.save(
                {"optimizer_state_dict": part, **facts},
                folder / f"{'bf16_' * bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            if stage == 3 or rank == 0:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                name = f"{prefix}mp_rank_00_model_states.pt"
                torch.save(_model_states(model, groups, stage, ranks, rank) | facts, folder / name)
    (folder.parent / "latest").write_text(folder.name)
    return folder


def _named_groups(model: nn.Module, adam: Adam) -> list[list[str]]:
    names = {param: name for name, param in model.named_parameters()}
    return [[names[param] for param in group["params"]] for group in adam.param_groups]


def _stages_1_and_2(
    groups: Sequence[Sequence[str]], state: Any, ranks: int, rank: int
) -> dict[str, Any]:
    flats, lean, paddings, slices = [], [], [], []
    for names in groups:
        kinds = [torch.cat([state[name][kind].reshape(-1) for name in names]) for kind in KINDS]
        numel = kinds[0].numel()
        kinds = [nn.functional.pad(flat, (0, -numel % (2 * ranks))) for flat in kinds]
        size = kinds[0].numel() // ranks
        shards = [flat[rank * size : (rank + 1) * size].clone() for flat in kinds]
        padding = min(size, max(0, (rank + 1) * size - numel))
        paddings.append(padding)
        flats.append(shards)
        lean.append(shards[0][: size - padding])
        slices.append(OrderedDict((name, _Fragment(1, 0)) for name in names))
    return {
        "flats": flats,
        "indices": [[at] for at in range(len(groups))],
        "optimizer": "base_optimizer_state",
        "single_partition_of_fp32_groups": lean,
        "group_paddings": paddings,
        "param_slice_mappings": slices,
    }


def _stage_3(groups: Sequence[Sequence[str]], state: Any, ranks: int, rank: int) -> dict[str, Any]:
    flats: list[list[Tensor]] = []
    indices: list[list[int]] = []
    for names in groups:
        indices.append([])
        for at in range(0, len(names), 2):  # sub-groups of two parameters
            parts = [
                [_part_of_3(state[name][kind], ranks, rank) for name in names[at : at + 2]]
                for kind in KINDS
            ]
            indices[-1].append(len(flats))
            flats.append([torch.cat(of_kind) for of_kind in parts])
    return {
        "flats": flats,
        "indices": indices,
        "optimizer": "optimizer_state_dict",
        "fp32_flat_groups": [flat[0] for flat in flats],
    }


def _part_of_3(values: Tensor, ranks: int, rank: int) -> Tensor:
    flat = values.reshape(-1)
    flat = nn.functional.pad(flat, (0, -flat.numel() % ranks), value=9.0)
    return flat.view(ranks, -1)[rank].clone()


def _model_states(
    model: nn.Module, groups: Sequence[Sequence[str]], stage: int, ranks: int, rank: int
) -> dict[str, Any]:
    params = dict(model.named_parameters())
    frozen = {name: param for name, param in params.items() if not param.requires_grad}
    weights = model.state_dict()
    trained_or_frozen = dict(model.named_parameters(remove_duplicate=False))
    buffers = [name for name in weights if name not in trained_or_frozen]
    module = {
        name: torch.empty(0) if stage == 3 else value.bfloat16()
        for name, value in weights.items()
        if name not in buffers
    } | {name: weights[name] for name in buffers}
    return {
        "module": module,
        "buffer_names": buffers,
        "optimizer": None,
        "param_shapes": [OrderedDict((name, params[name].shape) for name in g) for g in groups],
        "frozen_param_shapes": {name: param.shape for name, param in frozen.items()},
        "frozen_param_fragments": {
            name: _part_of_3(p, ranks, rank) if stage == 3 else p.detach()
            for name, p in frozen.items()
        },
        "shared_params": {"tied.weight": "head.weight"},
        "lr_scheduler": None,
        "sparse_tensor_module_names": set(),
        "global_steps": 3,
    }
