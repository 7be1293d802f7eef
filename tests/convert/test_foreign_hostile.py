"""Files that would run code, grow or lie: one line, in a process that could do little anyway."""

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

from offloadtrain.cli.main import main
from offloadtrain.convert.checkpoint import ForeignError
from offloadtrain.convert.dcp_folder import read_index
from offloadtrain.convert.reader import open_foreign
from offloadtrain.convert.reader_process import read
from offloadtrain.convert.run_import import model_tensors
from tests.convert.foreign_sources import Toy, save_dcp, save_torch, save_zero, trained_toy
from tests.train.small_job import JOB, write_text

pytestmark = pytest.mark.slow

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


HOSTILE_TORCH: dict[str, Callable[[Path, Path], object]] = {
    "it needs posix.system, and only tensors and plain values are read": with_payload,
    "was not written by torch.save": lambda p, mark: p.write_bytes(pickle.dumps(Payload(mark))),
    "is cut short": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "is compressed": lambda path, _: rewritten(
        path, lambda _, data: data, compression=zipfile.ZIP_DEFLATED
    ),
    "cannot be read": lambda path, _: rewritten(path, beyond),
    "'mean' has the shape (1099511627776,) in the checkpoint": with_a_huge_tensor,
    "it cannot be read": lambda path, _: rewritten(path, reversed_pickle),
    "it needs _io.BytesIO": lambda p, _: save_torch(p, *trained_toy(), extra=io.BytesIO(b"")),
    "a FIFO, not a regular file": as_a_fifo,
    "it is cut short": lambda path, _: path.write_bytes(b""),
}


def assert_refused(path: Path, message: str, mark: Path) -> None:
    """In one line, and nothing in the file has run."""
    with pytest.raises(ForeignError) as caught:
        read([path], WANTED)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not mark.exists()


def test_a_hostile_file_of_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    for message, spoil in HOSTILE_TORCH.items():
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


def test_the_command_makes_nothing_of_a_hostile_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    path = tmp_path / "a.pt"
    with_payload(path, tmp_path / "mark")
    before = sorted(os.listdir(tmp_path))
    assert main(["convert", str(path), "--job", str(tmp_path / "job.toml")]) == 1
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if not line.startswith("...")]
    assert len(lines) == 1 and lines[0].startswith(f"{path}: it needs posix.system")
    assert output.out == "" and sorted(os.listdir(tmp_path)) == before
