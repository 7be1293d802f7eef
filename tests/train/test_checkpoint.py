"""Checkpoints round-trip, and name what is wrong with one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from tests.train.toy_state import ToyModel, ToyState, filled, same


def save_steps(folder: Path, *steps: int, **options: Any) -> None:
    for step in steps:
        checkpoint.save(folder, step, *filled(step), {"step": step}, **options)


def never_damaged(path: Path, damage: DamagedCheckpointError) -> None:
    raise AssertionError(f"{path}: {damage}")


def test_everything_comes_back(tmp_path: Path) -> None:
    model, state = filled(7)
    saved = checkpoint.save(tmp_path, 7, model, state, {"nested": {"rate": 0.1}, "list": [1, 2]})
    found = checkpoint.newest_good(tmp_path, never_damaged)
    assert found is not None and found.path == saved.path == tmp_path / "step-00000007"
    assert (found.step, found.state) == (7, {"nested": {"rate": 0.1}, "list": [1, 2]})

    other_model, other_state = filled(8)
    checkpoint.restore(found, other_model, other_state)
    assert same(state, other_state)
    assert other_model.seen == 7
    assert torch.equal(model.frozen.weight, other_model.frozen.weight)


def test_the_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    _, state = filled(1)
    path = checkpoint.save(tmp_path, 1, *filled(1), {}).path
    tensors = load_file(path / "tensors-00000.safetensors")
    assert torch.equal(tensors["master/first.weight"], state.tensors["first.weight"]["master"])
    assert tensors["untrained/seen"].shape == ()
    assert "untrained/cache" not in tensors
    names = {
        (t["kind"], t["name"]) for t in json.loads((path / "manifest.json").read_text())["tensors"]
    }
    assert names == {tuple(key.split("/")) for key in tensors}
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}


def test_files_are_bounded_and_hold_whole_parameters(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, *filled(1), {}, group_bytes=200).path
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        owners = [key.split("/")[1] for key in load_file(file) if not key.startswith("untrained")]
        assert all(owners.count(owner) == 3 for owner in owners)
    model, state = filled(2)
    checkpoint.restore(checkpoint.verify(path), model, state)
    assert same(state, filled(1)[1])


def test_saving_copies_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the memory of the tensors themselves."""
    model, state = filled(1)
    parts: list[int] = []
    real = checkpoint.atomic_io.write_file

    def spy(path: Path, content: Any) -> Any:
        def watched() -> Any:
            for part in content:
                if isinstance(part, memoryview) and len(part):
                    parts.append(torch.frombuffer(part, dtype=torch.uint8).data_ptr())
                yield part

        return real(path, watched())

    monkeypatch.setattr(checkpoint.atomic_io, "write_file", spy)
    checkpoint.save(tmp_path, 1, model, state, {})
    own = {
        t.data_ptr() for tensors in state.tensors.values() for t in tensors.values() if t.numel()
    }
    assert own <= set(parts)


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 30, 4)
    assert [p.name for p in checkpoint.prune(tmp_path, 2)] == ["step-00000002", "step-00000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000030"]
    with pytest.raises(ValueError, match="at least 2"):
        checkpoint.prune(tmp_path, 1)


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists already"):
        save_steps(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_flip, Path.unlink], ids=["cut", "flip", "lost"]
)
@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_falls_back_loudly(tmp_path: Path, name: str, damage: Any) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    reported: list[str] = []
    found = checkpoint.newest_good(tmp_path, lambda path, error: reported.append(str(error)))
    assert found is not None and found.step == 1
    assert len(reported) == 1 and name in reported[0]
    checkpoint.set_aside(tmp_path / "step-00000002")
    save_steps(tmp_path, 2)
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step-00000002", "step-00000001"]


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    good = manifest.read_bytes()
    parsed = json.loads(good)
    for index in range(0, len(good), 37):
        for bit in (0, 5):
            changed = bytearray(good)
            changed[index] ^= 1 << bit
            manifest.write_bytes(changed)
            try:
                found = checkpoint.verify(manifest.parent)
            except DamagedCheckpointError:
                continue
            assert found.manifest == parsed, "a change that is only layout of the text"


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert checkpoint.newest_good(tmp_path, never_damaged) is None
    assert checkpoint.newest_good(tmp_path / "absent", never_damaged) is None


def test_a_newer_version_is_not_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    content = json.loads(manifest.read_text()) | {"version": 2}
    content["sha256"] = checkpoint.digest_of(content)
    manifest.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match="format version 2; this offloadtrain reads up to version 1"
    ):
        checkpoint.newest_good(tmp_path, never_damaged)


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    model, state = filled(5, width=9)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(checkpoint.verify(tmp_path / "step-00000001"), model, state)
    assert "first.weight: 8x8 in the checkpoint, 9x9 here" in str(caught.value)
    assert "3 names or shapes differ" in str(caught.value)
    assert same(state, filled(5, width=9)[1])


def test_a_renamed_parameter_is_another_model(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    model, state = filled(1)
    state.tensors["third.weight"] = state.tensors.pop("second.weight")
    del model.second
    with pytest.raises(CheckpointError, match=r"third.weight: absent in the checkpoint, 3x8 here"):
        checkpoint.restore(checkpoint.verify(tmp_path / "step-00000001"), model, state)


def test_too_little_space_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1)

    class FullDisk:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr("os.statvfs", lambda path: FullDisk)
    with pytest.raises(CheckpointError, match=r"needs .* and .* is free"):
        save_steps(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_dtype_that_cannot_be_held_is_named(tmp_path: Path) -> None:
    model = ToyModel()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"untrained/wave is torch.complex64"):
        checkpoint.save(tmp_path, 1, model, ToyState(model), {})
    assert list(tmp_path.iterdir()) == []
