"""Checkpoints of torch, FSDP and DeepSpeed: every tensor is found, or it is said which is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadtrain.convert.checkpoint import MOMENTS, ForeignError
from offloadtrain.convert.reader_process import read
from offloadtrain.convert.run_import import model_tensors
from tests import levels
from tests.convert.foreign_sources import (
    Toy,
    groups_of,
    save_dcp,
    save_torch,
    save_zero,
    split_dcp,
    state_of,
    trained_toy,
)

Save = Callable[[Path, Toy, torch.optim.Optimizer], list[Path]]


def values(paths: list[Path], model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return every tensor as the reader would send it, and the facts."""
    wanted = list(model_tensors(model))
    ordered, facts = read(paths, wanted)
    sent = ordered.tensors()
    tensors: dict[str, Any] = {}
    for tensor in wanted:
        kinds = ("master", *MOMENTS) if tensor.trained else ("weight",)
        tensors[tensor.name] = {kind: next(sent).view(tensor.shape) for kind in kinds}
    assert next(sent, None) is None
    return tensors, facts


def zero(stage: int, ranks: int) -> Save:
    return lambda at, *of: [save_zero(at / "run" / "global_step3", *of, stage=stage, ranks=ranks)]


def torch_parts(at: Path, model: Toy, adam: torch.optim.Optimizer) -> list[Path]:
    torch.save(model.state_dict(), at / "weights.pt")
    torch.save(adam.state_dict(), at / "adam.pt")
    return [at / "weights.pt", at / "adam.pt"]


def other_keys(at: Path, model: Toy, adam: torch.optim.Optimizer) -> list[Path]:
    """As Lightning nests it, from a model in DistributedDataParallel under torch.compile."""
    weights = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    content = {"epoch": 1, "state_dict": weights, "optimizer_states": [adam.state_dict()]}
    torch.save(content, at / "last.ckpt")
    return [at / "last.ckpt"]


def by_name(at: Path, model: Toy, adam: torch.optim.Optimizer) -> list[Path]:
    """In an order that shapes do not tell, with the names that torch keeps."""
    names = {param: name for name, param in model.named_parameters()}
    mixed = [param for group in adam.param_groups for param in group["params"]][::-1]
    other = torch.optim.AdamW([(names[param], param) for param in mixed], lr=1e-2)
    other.state.update(adam.state)
    return [save_torch(at / "named.pt", model, other)]


SOURCES: dict[str, Save] = {
    "torch": lambda at, *of: [save_torch(at / "both.pt", *of, epoch=3)],
    "torch, two files": torch_parts,
    "torch, wrapped": other_keys,
    "torch, names": by_name,
    "dcp": lambda at, *of: [save_dcp(at / "dcp", *of, flat=False)],
    "dcp, flat": lambda at, *of: [save_dcp(at / "dcp", *of, flat=True)],
    "dcp, 2 ranks": lambda at, *of: [split_dcp(save_dcp(at / "dcp", *of, flat=False))],
    "zero, bf16": lambda at, *of: [save_zero(at / "r" / "s", *of, stage=1, ranks=4, bf16=True)],
    **{
        f"zero {stage}, {ranks}": zero(stage, ranks)
        for stage, ranks in ((1, 2), (2, 1), (2, 4), (3, 1), (3, 4))
    },
}


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("source", SOURCES)
def test_every_tensor_of_every_source(source: str, tmp_path: Path) -> None:
    model, adam = trained_toy()
    tensors, facts = values(SOURCES[source](tmp_path, model, adam), Toy())
    for name, expected in state_of(model, adam).items():
        for kind, value in expected.items():
            assert torch.equal(tensors[name][kind], value), (name, kind)
    for name in ("frozen.weight", "frozen.bias", "seen", "mean"):
        assert torch.equal(tensors[name]["weight"], model.state_dict()[name]), name
    assert len(tensors) == 9 and facts["step"] == 3
    decays = {name: group["weight_decay"] for names, group in facts["groups"] for name in names}
    if source != "torch, names":
        assert decays["first.weight"] == pytest.approx(0.1) and decays["first.bias"] == 0.0


@pytest.mark.slow
def test_a_deepspeed_run_is_read_by_its_newest_tag(tmp_path: Path) -> None:
    model, adam = trained_toy()
    save_zero(tmp_path / "run" / "global_step3", model, adam, stage=2, ranks=2)
    tensors, _ = values([tmp_path / "run"], Toy())
    assert torch.equal(tensors["first.weight"]["master"], model.first.weight)
    (tmp_path / "run" / "latest").write_text("../elsewhere")
    with pytest.raises(ForeignError, match="not a folder in it"):
        values([tmp_path / "run"], Toy())


@pytest.mark.slow
def test_narrow_weights_are_widened_with_a_note(tmp_path: Path) -> None:
    model, adam = trained_toy()
    weights = {k: v.bfloat16() if v.ndim else v for k, v in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": adam.state_dict()}, tmp_path / "a.pt")
    tensors, facts = values([tmp_path / "a.pt"], Toy())
    assert torch.equal(tensors["first.weight"]["master"], model.first.weight.bfloat16().float())
    assert "torch.bfloat16: masters have these values" in facts["notes"][0]


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["model"].pop(key)


def _state(content: dict[str, Any], key: int) -> dict[str, Any]:
    state: dict[str, Any] = content["optimizer"]["state"][key]
    return state


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "lacks 'norm.weight' of the job's model": _without("norm.weight"),
    "holds 'extra', which the job's model does not have": lambda c: c["model"].update(
        extra=torch.ones(2)
    ),
    "'mean' has the shape": lambda c: c["model"].update(mean=torch.zeros(4)),
    "'seen' is torch.float32, which is not converted": lambda c: c["model"].update(
        seen=torch.zeros(())
    ),
    "'first.weight' is torch.float64, which is not": lambda c: c["model"].update(
        {"first.weight": torch.zeros(7, 5, dtype=torch.float64)}
    ),
    "are tied in the job, and differ": lambda c: c["model"].update(
        {"tied.weight": torch.zeros(5, 7)}
    ),
    "no state of 'first.weight', which the job trains": lambda c: c["optimizer"]["state"].pop(0),
    "is at step 1 and others are at 3": lambda c: _state(c, 0).update(step=torch.tensor(1.0)),
    "is at step nan, which is not a number of steps": lambda c: [
        entry.update(step=float("nan")) for entry in c["optimizer"]["state"].values()
    ],
    "'first.weight' has the state exp_avg, exp_avg_sq, max_exp_avg_sq": lambda c: _state(
        c, 0
    ).update(max_exp_avg_sq=torch.zeros(7, 5)),
    "amsgrad = True": lambda c: c["optimizer"]["param_groups"][0].update(amsgrad=True),
    "no state yet": lambda c: c["optimizer"]["state"].clear(),
    "other shapes than 'first.weight'": lambda c: _state(c, 0).update(exp_avg=torch.zeros(7)),
    "no state of an optimizer": lambda c: c.pop("optimizer"),
    "no dictionary of weights": lambda c: c.pop("model"),
    "names are not certain": lambda c: c["optimizer"].update(
        param_groups=[{**c["optimizer"]["param_groups"][0], "params": [k]} for k in range(5)]
    ),
}


@pytest.mark.slow
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for message, spoil in WRONG.items():
        model, adam = trained_toy()
        content = {"model": model.state_dict(), "optimizer": adam.state_dict()}
        spoil(content)
        torch.save(content, path)
        with pytest.raises(ForeignError) as caught:
            values([path], Toy())
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{path}: ")
    # Two matrices and two vectors: the numbers do not say which group is first.
    pair = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    adam = torch.optim.AdamW(groups_of(pair))
    pair(torch.ones(1, 3)).sum().backward()
    adam.step()
    with pytest.raises(ForeignError, match="names are not certain"):
        values([save_torch(path, pair, adam)], pair)


def _drop(path: str) -> Callable[[Path], object]:
    return lambda folder: (folder / path).unlink()


_LAST = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
BROKEN: dict[str, Callable[[Path], object]] = {
    "was written by 2 ranks, and has 1": _drop(_LAST),
    "files of ranks are missing": _drop("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "has no file like": _drop("mp_rank_00_model_states.pt"),
    "it is cut short": lambda folder: (folder / _LAST).write_bytes(b"PK\3\4"),
    "tensor-parallel": lambda folder: (folder / _LAST).rename(
        folder / _LAST.replace("mp_rank_00", "mp_rank_01")
    ),
}


@pytest.mark.slow
def test_a_broken_folder_of_deepspeed_is_refused_in_one_line(tmp_path: Path) -> None:
    for number, (message, spoil) in enumerate(BROKEN.items()):
        folder = save_zero(tmp_path / f"{number}" / "step", *trained_toy(), stage=2, ranks=2)
        spoil(folder)
        with pytest.raises(ForeignError, match=message):
            values([folder], Toy())


@pytest.mark.slow
def test_too_few_elements_are_noticed(tmp_path: Path) -> None:
    model, adam = trained_toy()
    for stage in (2, 3):
        folder = save_zero(tmp_path / f"{stage}" / "a", model, adam, stage=stage, ranks=2)
        for path in folder.glob("*_model_states.pt"):
            content = torch.load(path, weights_only=True)
            content["param_shapes"][0]["head.weight"] = torch.Size([9, 7])
            torch.save(content, path)
        with pytest.raises(ForeignError, match=r"elements, and the ranks' parts"):
            values([folder], Toy())
