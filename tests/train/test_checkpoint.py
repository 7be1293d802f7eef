"""Checkpoints round-trip and name the damage of one that cannot be used; the order of a save
(`test_storage_faults.py` has the faults at every call); reads into scattered memory."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import mmap
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from offloadtrain.engine.saved_state import StateWriter
from offloadtrain.hardware import direct_io
from offloadtrain.hardware.direct_io import BLOCK, DirectFile, aligned_buffer
from offloadtrain.runtime.lanes import Lane
from offloadtrain.train.checkpoint import checkpoint, reader
from offloadtrain.train.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    Region,
    digest_of,
    lay_out,
)
from offloadtrain.train.checkpoint.reader import Piece, Target, scatter
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import Part, Save, TensorWriter, save
from tests.conftest import Command
from tests.runtime.fake_cuda import installed
from tests.train.faulty_os import FaultyOs, fail_with, through
from tests.train.toy_state import ToyModel, ToyState, filled, same


def save_steps(folder: Path, *steps: int, **options: Any) -> None:
    for step in steps:
        save(folder, step, *filled(step), {"step": step}, **options)


def never_damaged(path: Path, damage: DamagedCheckpointError) -> None:
    raise AssertionError(f"{path}: {damage}")


class LateState(ToyState):
    """Writes when it is waited for, as the lane of writes may."""

    def write_state(self, writer: StateWriter) -> None:
        self.writer = writer

    def finish_writing(self) -> None:
        super().write_state(self.writer)


def test_a_frozen_parameter_that_changes_meanwhile_is_never_half_saved(tmp_path: Path) -> None:
    model, _ = filled(7)
    before = model.frozen.weight.detach().clone()
    torn = Save(tmp_path, 7, model, LateState(model), {})
    torch.nn.init.constant_(model.frozen.weight, 0.0)
    with pytest.raises(CheckpointError, match=r"7 was not saved: .*'frozen.weight', which is not"):
        torn.commit()
    assert [*tmp_path.iterdir()] == []
    torch.nn.init.constant_(model.frozen.weight, 7.5)
    second = Save(tmp_path, 8, model, LateState(model), {}, changing=["frozen.weight"])
    torch.nn.init.constant_(model.frozen.weight, 0.0)
    second.commit()
    newest = checkpoint.newest_good(tmp_path, never_damaged)
    assert newest is not None
    restore(newest, model, ToyState(model))
    assert torch.equal(model.frozen.weight, before)


def test_everything_comes_back(tmp_path: Path) -> None:
    for empty in (tmp_path, tmp_path / "absent"):
        assert checkpoint.newest_good(empty, never_damaged) is None
    model, state = filled(7)
    saved = save(tmp_path, 7, model, state, {"nested": {"rate": 0.1}, "list": [1, 2]})
    newest = checkpoint.newest_good(tmp_path, never_damaged)
    assert newest is not None and newest.path == saved.path == tmp_path / "step-00000007"
    assert (newest.step, newest.state) == (7, {"nested": {"rate": 0.1}, "list": [1, 2]})

    other_model, other_state = filled(8)
    restore(newest, other_model, other_state)
    assert same(state, other_state)
    assert other_model.seen == 7
    assert torch.equal(model.frozen.weight, other_model.frozen.weight)


def test_the_files_are_raw_tensors_and_json(tmp_path: Path) -> None:
    _, state = filled(1)
    path = save(tmp_path, 1, *filled(1), {}).path
    content = json.loads((path / "manifest.json").read_text())
    raw = (path / "rank-000.bin").read_bytes()
    stored = {}
    for entry in content["tensors"]:
        assert entry["span"][0] % 4096 == 0 == entry["span"][1] % 4096
        dtype = getattr(torch, entry["dtype"])
        data = raw[entry["offset"] : entry["offset"] + entry["count"] * dtype.itemsize]
        values = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0)
        stored[entry["kind"], entry["name"]] = values.view(entry["shape"])
        windows = [raw[slice(*entry["span"])]] if data else []
        assert entry["xxh3_128"] == [xxhash.xxh3_128_hexdigest(window) for window in windows]
    for name, tensors in state.tensors.items():
        for kind, tensor in tensors.items():
            assert torch.equal(stored[kind, name], tensor)
    assert stored["untrained", "seen"].shape == () and ("untrained", "cache") not in stored
    assert {p.name for p in path.iterdir()} == {"rank-000.bin", "state.json", "manifest.json"}


def test_saving_copies_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the memory of the tensors themselves, but for their last block."""
    written: list[tuple[int, int]] = []
    real = DirectFile.write

    def spy(self: DirectFile, data: memoryview, offset: int) -> None:
        written.append((torch.frombuffer(data, dtype=torch.uint8).data_ptr(), len(data)))
        real(self, data, offset)

    monkeypatch.setattr(DirectFile, "write", spy)
    monkeypatch.setattr(direct_io, "WINDOW_BYTES", 4 * BLOCK)
    region, memory = big_region(tmp_path, 10 * BLOCK)
    writer = TensorWriter(tmp_path / "rank-000.bin", [region])
    writer.write([Part(region, memory, 0, memory.numel())])
    writer.finish()
    windows = {(memory.data_ptr() + at, 4 * BLOCK) for at in (0, 4 * BLOCK)}
    assert windows <= set(written) and len(written) == 3
    assert (tmp_path / "rank-000.bin").read_bytes() == memory.numpy().tobytes()


def test_state_on_a_device_is_copied_on_the_stream_of_who_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on that of the threads which write the file: it is compute's."""
    region, memory = big_region(tmp_path, 10 * BLOCK)
    writer, used = TensorWriter(tmp_path / "rank-000.bin", [region]), []
    with installed("thread") as gpu, monkeypatch.context() as patch:
        stream = gpu.stream_type()
        gpu.use({Lane.WRITE: stream})
        patch.setattr(torch.Tensor, "is_cuda", True)
        aligned = TensorWriter._aligned

        def spy(writer: TensorWriter, part: torch.Tensor, num_bytes: int) -> memoryview:
            used.append(gpu.lane_of(gpu.current_stream()))
            return aligned(writer, part, num_bytes)

        patch.setattr(TensorWriter, "_aligned", spy)
        with gpu.stream(stream):
            writer.write([Part(region, memory, 0, memory.numel())])
    writer.finish()
    assert writer.failure is None and used == [Lane.WRITE]
    assert (tmp_path / "rank-000.bin").read_bytes() == memory.numpy().tobytes()


def big_region(folder: Path, num_bytes: int) -> tuple[Region, torch.Tensor]:
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    memory.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8))
    (region,) = lay_out("rank-000.bin", [], {"bytes": memory})
    return region, memory


def test_steps_are_ordered_and_pruned_by_number(tmp_path: Path) -> None:
    save_steps(tmp_path, 30, 99_999_998, 99_999_999, 100_000_001, 1_000_000_000)
    newest = checkpoint.newest_good(tmp_path, never_damaged)
    assert newest is not None and newest.step == 1_000_000_000
    removed = checkpoint.prune(tmp_path, 2)
    assert [checkpoint.step_of(path) for path in removed] == [99_999_999, 99_999_998, 30]
    with pytest.raises(ValueError, match="at least 2"):
        checkpoint.prune(tmp_path, 1)
    (tmp_path / "step-100000002.tmp-0a").mkdir()
    (tmp_path / "step-000000003").mkdir()  # nobody writes this name
    checkpoint.clean(tmp_path)
    names = {"step-100000001", "step-1000000000", "step-000000003"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_what_is_removed_is_not_followed(tmp_path: Path) -> None:
    """Leftovers and checkpoints that are links lead to somebody's own files."""
    precious = tmp_path / "precious"
    (precious / "inside").mkdir(parents=True)
    (precious / "thesis").write_text("five years")
    folder = tmp_path / "checkpoints"
    save_steps(folder, 2, 3)
    for name in ("step-00000001", "step-00000009.tmp-ab", ".trash-step-00000001"):
        (folder / name).symlink_to(precious)
    (folder / "step-00000008.tmp-ab").write_text("a file")
    (folder / "step-00000007.tmp-ab" / "inside").mkdir(parents=True)
    (folder / "step-00000007.tmp-ab" / "inside" / "link").symlink_to(precious)
    save_steps(folder, 4)
    checkpoint.prune(folder, 3)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003", "step-00000004"]
    assert sorted(os.listdir(precious)) == ["inside", "thesis"]


def test_what_cannot_be_removed_stops_neither_a_save_nor_other_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system keeps a file that another process has open."""
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000009.tmp-ab").mkdir()
    remove, stuck = os.rmdir, ("step-00000009.tmp-ab", ".trash-step-00000002")

    def rmdir(path: Path) -> None:
        if path.name.startswith(stuck):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        save_steps(tmp_path, 4)
        with pytest.raises(OSError, match="not empty"):
            checkpoint.prune(tmp_path, 2)
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000004", "step-00000003"]
    save_steps(tmp_path, 5)
    assert checkpoint.unfinished(tmp_path) == []


def test_a_save_that_cannot_be_made_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is never overwritten, and too little space is noticed before anything is written."""
    save_steps(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists already"):
        save_steps(tmp_path, 1)
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda path: full)
    with pytest.raises(CheckpointError, match=r"needs .* and .* is free in .* Older ones are inta"):
        save_steps(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"is free in .*\. There is no older one\. Free some"):
        save_steps(tmp_path / "step-00000001", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: tuple[Callable[[Path], object], ...] = (
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    flip,
    Path.unlink,
)


def test_a_damaged_newest_falls_back_loudly(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for name, damage in itertools.product(("rank-000.bin", "state.json", "manifest.json"), DAMAGES):
        damage(tmp_path / "step-00000002" / name)
        assert name in passed_over(tmp_path)
        checkpoint.set_aside(tmp_path / "step-00000002")
        save_steps(tmp_path, 2)
        names = [path.name for path in checkpoint.find(tmp_path)]
        assert names == ["step-00000002", "step-00000001"]


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    good = manifest.read_bytes()
    parsed = checkpoint.verify(manifest.parent).manifest
    for index in range(0, len(good), 37):
        for bit in (0, 5):
            changed = bytearray(good)
            changed[index] ^= 1 << bit
            manifest.write_bytes(changed)
            try:
                verified = checkpoint.verify(manifest.parent)
            except DamagedCheckpointError:
                continue
            assert verified.manifest == parsed, "a change that is only layout of the text"


def test_a_newer_version_is_not_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    change(manifest, lambda content: content.update(version=3))
    with pytest.raises(CheckpointError, match=r"format version 3; .* reads version 2"):
        checkpoint.newest_good(tmp_path, never_damaged)


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    saved = checkpoint.verify(tmp_path / "step-00000001")
    model, state = filled(5, width=9)
    with pytest.raises(CheckpointError) as caught:
        restore(saved, model, state)
    assert "first.weight: 8x8 in the checkpoint, 9x9 here" in str(caught.value)
    assert "3 names or shapes differ" in str(caught.value)
    assert same(state, filled(5, width=9)[1])
    model, state = filled(1)
    state.tensors["third.weight"] = state.tensors.pop("second.weight")
    del model.second
    with pytest.raises(CheckpointError, match=r"third.weight: absent in the checkpoint, 3x8 here"):
        restore(saved, model, state)


def test_a_dtype_that_cannot_be_held_is_named(tmp_path: Path) -> None:
    model = ToyModel()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"untrained/wave is torch.complex64; a checkpoint"):
        save(tmp_path, 1, model, ToyState(model), {})
    assert list(tmp_path.iterdir()) == []


def change(manifest: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a manifest and give it the hash that fits."""
    content = json.loads(manifest.read_text())
    edit(content)
    content["sha256"] = digest_of(content)
    manifest.write_text(json.dumps(content))


def _tensor(content: dict[str, Any], number: int = 3, **values: Any) -> None:
    """Change a tensor, by default the master of first.weight."""
    content["tensors"][number].update(values)


def _without(content: dict[str, Any], name: str) -> None:
    content["tensors"] = [entry for entry in content["tensors"] if entry["name"] != name]


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no version": lambda m: m.pop("version"),
    "version 0": lambda m: m.update(version=0),
    "version true": lambda m: m.update(version=True),
    "version as text": lambda m: m.update(version="2"),
    "a tensor less": lambda m: m["tensors"].pop(),
    "a parameter less": lambda m: _without(m, "first.weight"),
    "no tensors": lambda m: m.update(tensors=[]),
    "tensors are a number": lambda m: m.update(tensors=7),
    "a tensor is null": lambda m: m["tensors"].append(None),
    "a tensor twice": lambda m: m["tensors"].append(m["tensors"][0]),
    "overlapping": lambda m: _tensor(m, 4, span=m["tensors"][3]["span"]),
    "in another file": lambda m: _tensor(m, file="../../passwd"),
    "a file above": lambda m: m["files"].update({"../x.bin": {"bytes": 1}}),
    "a file of the system": lambda m: m["files"].update({"/dev/zero": {"bytes": 1}}),
    "a file without size": lambda m: m["files"].update({"rank-001.bin": {}}),
    "a name with escapes": lambda m: _tensor(m, name="a\x1b]52;c;eA==\x07"),
    "a name of no letters": lambda m: _tensor(m, name=""),
    "a negative offset": lambda m: _tensor(m, offset=-1),
    "an offset beyond": lambda m: _tensor(m, offset=1 << 61),
    "a huge shape": lambda m: _tensor(m, shape=[1 << 61, 1 << 61], range=[0, 1 << 61]),
    "a shape of text": lambda m: _tensor(m, shape=["8"]),
    "an unknown dtype": lambda m: _tensor(m, dtype="complex64"),
    "a dtype that is no text": lambda m: _tensor(m, dtype=[]),
    "a range beyond": lambda m: _tensor(m, range=[0, 65]),
    "more values": lambda m: _tensor(m, count=65),
    "a hash less": lambda m: _tensor(m, xxh3_128=[]),
    "a hash that is none": lambda m: _tensor(m, xxh3_128=["z" * 32]),
    "a hash that is a number": lambda m: _tensor(m, xxh3_128=[7]),
    "strides of another shape": lambda m: _tensor(m, stride=[1]),
    "strides that leave it": lambda m: _tensor(m, stride=[1 << 40, 1]),
    "the step is text": lambda m: m.update(step="x"),
    "no state": lambda m: m["files"].pop("state.json"),
    "strides that overlap": lambda m: _tensor(m, stride=[0, 0]),
}


@pytest.mark.slow
def test_a_manifest_that_lies_is_passed_over(tmp_path: Path) -> None:
    """With a hash that fits: made by somebody, not by an accident."""
    save_steps(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    good = manifest.read_text()
    for edit in EDITS.values():
        manifest.write_text(good)
        change(manifest, edit)
        assert passed_over(tmp_path).isprintable()


@pytest.mark.slow
def test_a_file_that_is_no_file_is_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path / "good", 1, 2)
    names = ("rank-000.bin", "state.json", "manifest.json")
    for number, (make, name) in enumerate(itertools.product(FILES.values(), names)):
        folder = Path(shutil.copytree(tmp_path / "good", tmp_path / f"{number}"))
        make(folder / "step-00000002" / name)
        assert name in passed_over(folder)


def passed_over(folder: Path) -> str:
    """Return the report about checkpoint 2; number 1 is used."""
    reported: list[str] = []
    newest = checkpoint.newest_good(folder, lambda path, error: reported.append(str(error)))
    assert newest is not None and newest.step == 1
    (message,) = reported
    assert len(message) < 1000 and "step-00000002" in message
    return message


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _link(path: Path) -> None:
    target = path.parent.parent / f"target-{path.name}"
    path.rename(target)
    path.symlink_to(target)


FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": lambda path: replaced(path, os.mkfifo),
    "a link": _link,
    "a device": lambda path: replaced(path, lambda p: p.symlink_to("/dev/zero")),
    "a folder": lambda path: replaced(path, os.mkdir),
    "empty": lambda path: path.write_bytes(b""),
    "deep": lambda path: path.write_text("[" * 200_000),
    "a number of many digits": lambda path: path.write_text("9" * 100_000),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


def test_a_file_that_is_not_listed_is_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / "rank-001\x1b.bin").write_bytes(b"x")
    assert "which its manifest does not list" in passed_over(tmp_path)


def test_damage_that_is_met_while_loading_names_the_tensor(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    path = tmp_path / "step-00000002"
    entries = [item for item in checkpoint.verify(path).manifest.entries if item.nbytes]
    for entry in entries:
        for at in (entry.offset, entry.end - 1, entry.span[1] - 1):
            content = bytearray(good := (path / entry.file).read_bytes())
            content[at] ^= 4
            (path / entry.file).write_bytes(content)
            opened = checkpoint.newest_good(tmp_path, never_damaged, verified=False)
            assert opened is not None and opened.step == 2
            with pytest.raises(DamagedCheckpointError, match=f"{entry.kind} of '{entry.name}'"):
                restore(opened, *filled(9))
            (path / entry.file).write_bytes(good)


def test_where_no_space_can_be_reserved_nothing_is_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext3, for example: the C library would write a byte into each block."""
    requests: list[int] = []
    monkeypatch.setattr(direct_io, "_reserves", lambda fd: requests.append(fd))
    monkeypatch.setattr(os, "posix_fallocate", pytest.fail)
    save_steps(tmp_path, 1)
    assert requests and checkpoint.newest_good(tmp_path, never_damaged) is not None


def test_space_is_reserved_before_the_page_cache_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the C library writes single bytes, O_DIRECT would refuse them."""
    reserve, flags = os.posix_fallocate, []

    def reserved(fd: int, offset: int, count: int) -> None:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        reserve(fd, offset, count)

    monkeypatch.setattr(os, "posix_fallocate", reserved)
    save_steps(tmp_path, 1)
    DirectFile.scratch(tmp_path, BLOCK).close()
    assert flags == [0, 0]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext2"), reason="mounts, as root")
def test_a_file_system_of_old_keeps_checkpoints(tmp_path: Path) -> None:
    """One that reserves no space, and takes O_DIRECT."""
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext2", "-q", "-F", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, mounted], capture_output=True)
    if done.returncode:
        pytest.skip("no loop devices")
    try:
        save_steps(mounted / "checkpoints", 1, 2)
        newest = checkpoint.newest_good(mounted / "checkpoints", never_damaged)
        assert newest is not None and newest.step == 2
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_where_the_page_cache_cannot_be_passed_over_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems that refuse O_DIRECT, or memory that is not aligned to whole blocks."""
    real = os.pwrite

    def refuses(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuses)
    assert not save(tmp_path, 1, *filled(1), {}).direct
    model, state = filled(2)
    restore(checkpoint.verify(tmp_path / "step-00000001"), model, state)
    assert same(state, filled(1)[1])


# ---- the order of the calls of a save, and its remains where one fails

WRITES = ("posix_fallocate", "pwrite", "write", "fsync", "rename")


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save(folder, step, *filled(step), {"step": step})
    (folder / "step-00000003.tmp-dead").mkdir()
    (folder / "step-00000003.tmp-dead" / "rank-000.bin").write_bytes(b"half")
    return folder


def save_and_prune(folder: Path, fault: FaultyOs) -> None:
    """Save step 3 beside 1 and 2 and prune, with every `os` call going through `fault`."""
    with through(fault):
        save(folder, 3, *filled(3), {"step": 3})
        checkpoint.prune(folder, 2)


def fresh(two_saved: Path, scratch: Path) -> Path:
    shutil.rmtree(scratch, ignore_errors=True)
    return Path(shutil.copytree(two_saved, scratch))


def test_a_failed_write_leaves_nothing_behind(two_saved: Path, tmp_path: Path) -> None:
    folder = fresh(two_saved, tmp_path / "run")
    fault = FaultyOs()
    save_and_prune(folder, fault)
    writes = [n for n, (name, _) in enumerate(fault.calls) if name in WRITES]
    for at in writes[:-2]:
        folder = fresh(two_saved, tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"No space left on device\. Older ones are"):
            save_and_prune(folder, FaultyOs(at, fail_with(errno.ENOSPC)))
        if not (folder / "step-00000003").exists():
            assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002"]


# ---- the command


def test_checkpoints_are_listed_and_a_changed_byte_is_found_only_by_reading_it(
    tmp_path: Path, command: Command
) -> None:
    """The newest first. A folder that is no run is one line."""
    assert "is not a run folder" in command("checkpoints", tmp_path, code=2).err
    save_steps(tmp_path / "checkpoints", 1, 2, 3)
    flip(tmp_path / "checkpoints" / "step-00000002" / "rank-000.bin")
    head, *rows = [
        re.split("  +", line) for line in command("checkpoints", tmp_path).out.splitlines()
    ]
    assert head == ["checkpoint", "state", "size", "ranks"]
    assert rows == [[f"step-{step:08d}", "listed", "48.0 KiB", "1"] for step in (3, 2, 1)]
    out, err = command("checkpoints", tmp_path, "--verify", "--json", code=1)
    states = {row["name"][-1]: row["state"] for row in map(json.loads, out.splitlines())}
    assert states == {"3": "verified", "2": "damaged", "1": "verified"}
    assert err.count("\n") == 1 and " of '" in err


# ---- reads into scattered memory

MEMORY = 64 * BLOCK


def memory() -> torch.Tensor:
    """Return aligned memory of bytes that no file has."""
    aligned = torch.frombuffer(aligned_buffer(), dtype=torch.uint8)[:MEMORY]
    return aligned.fill_(255)


def targets_of(draw: random.Random, buffer: torch.Tensor) -> list[Target]:
    """Draw parameters of some buffers, each of which lies somewhere else than in the file."""
    targets: list[Target] = []
    at, start = draw.randrange(3 * BLOCK), 0
    while at < MEMORY // 2:
        shift = draw.choice((0, 512, 4608, 100))
        for _ in range(draw.randrange(1, 5)):
            numel = draw.randrange(1, 4 * BLOCK)
            if start + shift + numel > MEMORY:
                return targets
            place = buffer[start + shift : start + shift + numel]
            targets.append(Target(at, at + numel, place))
            gap = -numel % 256
            at, start = at + numel + gap, start + numel + gap
        start = -(-(start + shift) // BLOCK) * BLOCK
        at = -(-at // BLOCK) * BLOCK + draw.choice((0, BLOCK, 1000))
    return targets


def fill(targets: list[Target], pieces: list[Piece], file: bytes) -> None:
    """Read a file into the pieces, and copy what is not in place."""
    for piece in pieces:
        piece.memory[:] = file[piece.lo : piece.hi]
        for target in () if piece.in_place else targets:
            reader._copy(piece, target)


@pytest.mark.parametrize("seed", range(6))
def test_every_target_gets_its_bytes(seed: int) -> None:
    draw, file = random.Random(seed), random.Random(seed).randbytes(MEMORY)
    buffer = memory()
    targets = targets_of(draw, buffer)
    last = -(-targets[-1].hi // BLOCK) * BLOCK
    pieces = scatter(0, last, targets, aligned_buffer())
    assert pieces[0].lo == 0 and pieces[-1].hi == last
    assert all(before.hi == piece.lo for before, piece in pairwise(pieces))
    assert all(piece.lo % BLOCK == piece.hi % BLOCK == 0 for piece in pieces)
    fill(targets, pieces, file)
    for target in targets:
        assert bytes(target.memory.numpy()) == file[target.lo : target.hi]


def test_nothing_outside_of_the_targets_is_overwritten() -> None:
    """Neither around a buffer nor between two."""
    full = memory()
    targets = [Target(BLOCK + 256, 9 * BLOCK - 256, full[2 * BLOCK + 256 : 10 * BLOCK - 256])]
    pieces = scatter(BLOCK, 9 * BLOCK, targets, aligned_buffer())
    assert [piece.in_place for piece in pieces] == [False, True, False]
    fill(targets, pieces, bytes(MEMORY))
    inside = full[2 * BLOCK + 256 : 10 * BLOCK - 256]
    assert not inside.any() and int((full == 0).sum()) == inside.numel()

    full = memory()
    first, second = full[: 4 * BLOCK], full[6 * BLOCK : 10 * BLOCK]
    targets = [Target(0, 4 * BLOCK, first), Target(6 * BLOCK, 10 * BLOCK, second)]
    pieces = scatter(0, 10 * BLOCK, targets, aligned_buffer())
    assert [piece.in_place for piece in pieces] == [True, False, True]
    fill(targets, pieces, bytes(MEMORY))
    assert bool((full[4 * BLOCK : 6 * BLOCK] == 255).all())
