"""Checkpoints of torch, FSDP and DeepSpeed: every tensor is found, or it is said which is not."""

from __future__ import annotations

import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadtrain.convert.checkpoint import MOMENTS, ForeignError
from offloadtrain.convert.dcp_folder import read_index
from offloadtrain.convert.reader import open_foreign
from offloadtrain.convert.reader_process import read
from offloadtrain.convert.run_import import model_tensors
from tests import levels
from tests.conftest import Command
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
from tests.train.small_job import JOB, write_text

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


# ---- files that would run code, grow or lie

WANTED = list(model_tensors(Toy()))


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.command = f"touch {mark}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def rewritten(path: Path, change: Callable[[zipfile.ZipInfo, bytes], bytes], **how: Any) -> None:
    with zipfile.ZipFile(path) as before:
        entries = [(info, before.read(info)) for info in before.infolist()]
    with zipfile.ZipFile(path, "w", **how) as after:
        for info, content in entries:
            after.writestr(info.filename, change(info, content))


def expanded(model: Toy) -> dict[str, torch.Tensor]:
    """A tensor of 4 TB that one element in the file stands for."""
    weights: dict[str, torch.Tensor] = dict(model.state_dict())
    weights["mean"] = torch.zeros(1).expand(1 << 40)
    return weights


def beyond(info: zipfile.ZipInfo, content: bytes) -> bytes:
    """Shapes that claim more elements than the storage has: (7, 5) becomes (7, 127)."""
    if not info.filename.endswith("data.pkl"):
        return content
    edited = content.replace(b"K\x07K\x05\x86", b"K\x07K\x7f\x86")
    assert edited != content
    return edited


def with_payload(path: Path, mark: Path) -> None:
    save_torch(path, *trained_toy(), extra=Payload(mark))


def with_a_huge_tensor(path: Path, _: Path) -> None:
    model, adam = trained_toy()
    torch.save({"model": expanded(model), "optimizer": adam.state_dict()}, path)


def reversed_pickle(info: zipfile.ZipInfo, content: bytes) -> bytes:
    return content[::-1] if info.filename.endswith(".pkl") else content


def as_a_fifo(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HOSTILE_TORCH: list[tuple[str, Callable[[Path, Path], object]]] = [
    ("it needs posix.system, and only tensors and plain values are read", with_payload),
    ("was not written by torch.save", lambda p, mark: p.write_bytes(pickle.dumps(Payload(mark)))),
    ("it is cut short", lambda path, _: os.truncate(path, path.stat().st_size // 2)),
    (
        "it is compressed",
        lambda p, _: rewritten(p, lambda _, data: data, compression=zipfile.ZIP_DEFLATED),
    ),
    ("it cannot be read", lambda path, _: rewritten(path, beyond)),
    ("'mean' has the shape (1099511627776,) in the checkpoint", with_a_huge_tensor),
    ("it cannot be read", lambda path, _: rewritten(path, reversed_pickle)),
    ("it needs _io.BytesIO", lambda p, _: save_torch(p, *trained_toy(), extra=io.BytesIO(b""))),
    ("a FIFO, not a regular file", as_a_fifo),
    ("it is cut short", lambda path, _: path.write_bytes(b"")),
]


def assert_refused(path: Path, message: str, mark: Path) -> None:
    """In one line, and nothing in the file has run."""
    with pytest.raises(ForeignError) as caught:
        read([path], WANTED)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not mark.exists()


@pytest.mark.slow
def test_a_hostile_file_of_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    for message, spoil in HOSTILE_TORCH:
        path = save_torch(tmp_path / "a.pt", *trained_toy())
        spoil(path, tmp_path / "mark")
        assert_refused(path, message, tmp_path / "mark")
        path.unlink()


def metadata_payload(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))


def metadata_edit(change: Callable[[Any], object]) -> Callable[[Path, Path], None]:
    def edit(folder: Path, _: Path) -> None:
        content = pickle.loads((folder / ".metadata").read_bytes())
        change(content)
        (folder / ".metadata").write_bytes(pickle.dumps(content))

    return edit


def outside(content: Any) -> None:
    for info in content.storage_data.values():
        info.relative_path = "../../etc/passwd"


def far(content: Any) -> None:
    for info in content.storage_data.values():
        info.offset += 1 << 40


def object_payload(folder: Path, mark: Path) -> None:
    """An object of the optimizer's groups, which torch's own reader unpickles freely."""
    buffer = io.BytesIO()
    torch.save(Payload(mark), buffer)
    content = pickle.loads((folder / ".metadata").read_bytes())
    key = next(at for at in content.storage_data if at.fqn.endswith(".betas"))
    info = content.storage_data[key]
    info.relative_path, info.offset, info.length = "other.distcp", 0, len(buffer.getvalue())
    (folder / "other.distcp").write_bytes(buffer.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def no_chunks(content: Any) -> None:
    content.state_dict_metadata["model.mean"].chunks.clear()


HOSTILE_DCP: dict[str, Callable[[Path, Path], object]] = {
    "it needs posix.system, which no index": metadata_payload,
    "which is outside of its folder": metadata_edit(outside),
    "bytes from byte 1,099,511": metadata_edit(far),
    "it needs posix.system, and only tensors": object_payload,
    "'model.mean' is not whole": metadata_edit(no_chunks),
    "no index of a checkpoint": lambda folder, _: (folder / ".metadata").write_bytes(b"\x80\x04K"),
    "No such file": lambda folder, _: next(folder.glob("*.distcp")).unlink(),
}


@pytest.mark.slow
def test_a_hostile_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for number, (message, spoil) in enumerate(HOSTILE_DCP.items()):
        folder = save_dcp(tmp_path / f"{number}", *trained_toy(), flat=False)
        spoil(folder, mark)
        assert_refused(folder, message, mark)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".")
    with pytest.raises(ForeignError, match="no index of a checkpoint"):
        read_index(tmp_path / ".metadata")
    folder = save_zero(tmp_path / "run" / "step", *trained_toy(), stage=2, ranks=1)
    path = next(folder.glob("*_optim_states.pt"))
    rewritten(path, lambda _, data: data.replace(b"LossScaler", b"LossScalar"))
    assert_refused(folder, "deepspeed.runtime.fp16.loss_scaler.LossScalar", mark)


def limits_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return {line[:26].strip(): line[26:].split()[0] for line in lines[1:]}


@pytest.mark.slow
def test_the_reader_holds_no_secret_and_can_do_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it sends tensors: its environment, its limits, no open file but the pipes' and the
    checkpoint's; after it: no process."""
    monkeypatch.setenv("OFFLOADTRAIN_TEST_TOKEN", "secret")
    model = torch.nn.Linear(2000, 2000)  # more than a pipe holds: the reader waits
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2000)).sum().backward()
    adam.step()
    path = save_torch(tmp_path / "a.pt", model, adam)
    before = set(children())
    with open_foreign(path, None, list(model_tensors(model))) as foreign:
        (pid,) = set(children()) - before
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {entry.partition(b"=")[0] for entry in environment if entry}
        assert names <= {
            *(b"PATH", b"LD_LIBRARY_PATH", b"PYTHONPATH"),
            *(b"OMP_NUM_THREADS", b"CUDA_VISIBLE_DEVICES"),
        }
        limits = limits_of(pid)
        assert limits["Max file size"] == limits["Max core file size"] == "0"
        assert limits["Max processes"] == "0"
        assert 0 < int(limits["Max data size"]) < (5 << 30)
        assert int(limits["Max cpu time"]) > 0
        for wanted, tensors in foreign.tensors():
            expected = dict(model.named_parameters())[wanted.name]
            assert torch.equal(tensors["master"], expected)
    assert set(children()) == before
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0


def children() -> Sequence[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.mark.slow
def test_the_command_makes_nothing_of_a_hostile_file(tmp_path: Path, command: Command) -> None:
    write_text(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    path = tmp_path / "a.pt"
    with_payload(path, tmp_path / "mark")
    before = sorted(os.listdir(tmp_path))
    output = command("convert", path, "--job", tmp_path / "job.toml", code=2)
    lines = [line for line in output.err.splitlines() if not line.startswith("...")]
    assert len(lines) == 1 and lines[0].startswith(f"{path}: it needs posix.system")
    assert output.out == "" and sorted(os.listdir(tmp_path)) == before
