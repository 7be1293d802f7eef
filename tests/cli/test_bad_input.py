"""Bad input: one line on stderr, the exit code of its kind, nothing made, no escape
sequence passed on."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from offloadtrain.cli.main import main
from offloadtrain.data.tokens import TokenWriter
from tests.conftest import Command

Captured = pytest.CaptureFixture[str]

JOB = """
name = "small"
[model]
size = "debug"
[data]
source = "text"
seq_len = 128
[device]
kind = "cpu"
[train]
steps = 2
"""
LONG = "x" * 300
NINES = "9" * 5000
HOSTILE = "a\x1b]52;c;AAAA\x07\u202e\x9bb"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for key in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text("some text\n" * 100)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*")}


def only_line(err: str) -> str:
    """Return the message, without the lines of progress that a busy machine adds."""
    (line,) = (line for line in err.splitlines() if not line.startswith("... "))
    return line


def refused(command: Command, arguments: list[str], code: int) -> str:
    """Return the only line of stderr; nothing has been made."""
    before = files()
    out, err = command(*arguments, code=code)
    assert out == "" and files() == before
    line = only_line(err)
    assert line.isprintable() and len(line) < 1000
    return line


BAD_ARGUMENTS: list[tuple[list[str], int, str]] = [
    (["train", LONG], 2, "no such file"),
    (["train", LONG + ".toml"], 2, "File name too long"),
    (["train", HOSTILE], 2, "no such file"),
    (["train", "job.toml", "--nproc", NINES], 2, "--nproc 999"),
    (["train", "job.toml", "--nproc", "70000"], 2, "--nproc 70000"),
    (["train", "job.toml", "--nproc", "2", "--max-restarts", "-1"], 2, "--max-restarts -1"),
    (["train", "job.toml", "--max-restarts", "-1"], 2, "--max-restarts -1"),
    (["train", "job.toml", "--resume", LONG], 2, "no checkpoint"),
    (["train", "job.toml", "--resume", HOSTILE], 2, "no checkpoint"),
    (["train", "job.toml", "--run-dir", LONG], 2, "File name too long"),
    (["plan", LONG], 2, "no such file"),
    (["plan", "job.toml", "--machine", LONG], 2, "no such file"),
    (["plan", "job.toml", "--machine", HOSTILE], 2, "no such file"),
    (["plan", "job.toml", "--machine", "/dev/zero"], 2, "not a regular file"),
    (["plan", "job.toml", "--machine", "cpu2", "--host-memory", NINES], 2, "--host-memory"),
    (["plan", "job.toml", "--machine", "h100", "--gpu-memory", NINES], 2, "--gpu-memory"),
    (["plan", "job.toml", "--machine", "cpu2", "--sweep", f"gpus={NINES}"], 2, "--sweep"),
    (["plan", "job.toml", "--machine", "cpu2", "--gpus", "70000"], 2, "--gpus 70000"),
    *(
        (["plan", "job.toml", "--machine", "cpu2", *gpus, "--set", *keys], 2, message)
        for gpus, keys, message in (
            (
                (),
                ["offload.zero_stage=3", "offload.keep_whole=['nope']"],
                "keep_whole = 'nope' matches no module",
            ),
            ((), ["offload.activation=recompute", "offload.partition_activations=true"], "'tp'"),
            (("--gpus", "2"), ["offload.working=host", "offload.zero_stage=1"], "zero_stage = 3"),
        )
    ),
    (["cp", LONG], 2, "no such file"),
    (["cp", "demo", LONG], 2, "File name too long"),
    (["prepare", "text", "out", "--jobs", "-1"], 2, "jobs = -1"),
    (["prepare", "text", "out", "--jobs", "100000"], 2, "jobs = 100000"),
    (["prepare", "text", "out", "--val-fraction", "2"], 2, "val_fraction = 2"),
    (["prepare", "text", "out", "--val-fraction", "nan"], 2, "val_fraction = nan"),
    (["prepare", HOSTILE, "out"], 2, "no such file"),
    (["prepare", "text", "out", "--tokenizer", "gpt2"], 2, "no tokenizer 'gpt2': give bytes, a"),
    (["prepare", LONG, "out"], 2, "File name too long"),
    (["status", LONG], 2, "not there"),
    (["events", LONG], 2, "not there"),
    (["ctl", LONG, "stop"], 2, "not there"),
    (["tui", LONG, "--once"], 2, "not there"),
    (["status", HOSTILE], 2, "not there"),
    (["tui", HOSTILE, "--once"], 2, "not there"),
    (["trace", LONG], 2, "not there"),
    (["trace", HOSTILE], 2, "not there"),
]
ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE = 'x'"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0'"),
    ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE = '999"),
    ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
    (
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
        "MASTER_PORT = 'x'",
    ),
    (
        {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        "RANK = '2'",
    ),
]


def test_a_bad_argument_is_reported_in_one_line(command: Command) -> None:
    for arguments, code, message in BAD_ARGUMENTS:
        assert message in refused(command, arguments, code)


def test_an_environment_that_no_launcher_made_is_reported_in_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environ, message in ENVIRONMENTS:
        with monkeypatch.context() as patch:
            for key, value in environ.items():
                patch.setenv(key, value)
            assert message in refused(command, ["train", "job.toml"], 2)


@pytest.mark.parametrize("size", ["-1", "nan", "1e9999GiB"])
def test_stated_memory_that_is_no_size_is_wrong_input(
    size: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOADTRAIN_HOST_MEMORY", size)
    assert f"OFFLOADTRAIN_HOST_MEMORY: '{size}'" in refused(command, ["plan", "debug"], 2)


OF_NO_TYPE = ("{x = 1}", "1979-05-27", "[[1]]", "[{x = 1}]")
"""A table, a date, lists of types that no key lists."""
LARGE = (NINES, f"-{NINES}", f"1e{NINES}", "nan", "-inf", HOSTILE)
KEYS = (
    *("model.size", "model.dropout", "model.bias", "data.source", "optim.lr", "optim.betas"),
    *("offload.state_on", "offload.clip_norm", "offload.host_memory_limit", "offload.keep_fp32"),
    *("offload.resident_blocks", "offload.recompute_blocks", "ranks.layers_per_stage", "log.to"),
    *("device.threads", "device.machine", "train.steps", "train.on_alert", "train.sample_prompt"),
)
"""A key of each type."""


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_no_key_accepts_a_value_of_no_type_or_obeys_a_hostile_one(
    capsys: Captured, key: str
) -> None:
    """A key of text may have digits: whether it is refused is not tested here."""
    before = files()
    for value in (*OF_NO_TYPE, *LARGE):
        code = main(["plan", "job.toml", "--machine", "cpu2", "--set", f"{key}={value}"])
        out, err = capsys.readouterr()
        assert code in (0, 2, 4) and files() == before
        assert "Traceback" not in err and len(err) < 4000
        assert all(line.isprintable() for line in (*out.splitlines(), *err.splitlines()))
        if value in OF_NO_TYPE:
            assert code == 2 and key.split(".")[0] in err and len(err.splitlines()) <= 3


def test_escapes_that_the_argument_parser_quotes_are_removed(command: Command) -> None:
    """It says what is wrong in a frame of several lines."""
    for arguments in ([f"trai{HOSTILE}"], ["train", "demo", f"--{HOSTILE}", "1"]):
        err = command(*arguments, code=2).err
        assert all(line.isprintable() for line in err.splitlines()), err


BOMBS = {
    "a deep key": ".".join("a" * 20_000) + " = 1",
    "deep keys": "\n".join(f"{'.'.join('a' * 400)}.b{n} = 1" for n in range(60)),
    "many sections": "\n".join(f"[s{n}]" for n in range(60_000)),
    "many keys": "\n".join(f"k{n} = 1" for n in range(60_000)),
    "many keys in one line": "model = {" + ", ".join(f"k{n} = 1" for n in range(9_000)) + "}",
    "deep lists": f"a = {'[' * 30_000}",
    "deep tables": "a = " + "{a = " * 30_000,
}


@pytest.fixture
def parsed_if_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes minutes for some of them: it must not be asked."""
    parse = tomllib.loads

    def loads(text: str) -> dict[str, object]:
        assert len(text) < 2000, "a bomb is on the way to the parser"
        return parse(text)

    monkeypatch.setattr(tomllib, "loads", loads)


@pytest.mark.usefixtures("parsed_if_short")
def test_a_file_or_override_that_takes_minutes_to_parse_is_refused_at_once(
    command: Command, folder: Path
) -> None:
    for bomb in BOMBS.values():
        (folder / "bomb.toml").write_text(bomb)
        assert "too large for a job" in refused(command, ["train", "bomb.toml"], 2)
        line = refused(command, ["plan", "job.toml", "--machine", "bomb.toml"], 2)
        assert "bomb.toml" in line
    deep = ".".join("a" * 20_000)
    assert "too large" in refused(command, ["train", "job.toml", "--set", f"optim={{{deep}=1}}"], 2)
    line = refused(command, ["train", "job.toml", "--set", f"optim.lr.{deep}=1"], 2)
    assert "section.key=value" in line


def test_many_unknown_keys_are_counted(command: Command, folder: Path) -> None:
    (folder / "job.toml").write_text(JOB + "".join(f"key{n} = 1\n" for n in range(500)))
    lines = command("train", "job.toml", code=2).err.splitlines()
    assert len(lines) < 20 and "490 more" in lines[-1]


def test_a_token_file_that_cannot_be_sampled_from_is_refused_before_the_first_step(
    command: Command, folder: Path
) -> None:
    with TokenWriter(Path("t.bin"), vocab_size=256, tokenizer="words", fingerprint="") as tokens:
        tokens.write(np.zeros(4096, dtype=np.uint8))
        tokens.commit()
    (folder / "job.toml").write_text(JOB.replace('source = "text"', 'train = "t.bin"'))
    arguments = ["train", "job.toml", "--set", "train.sample_tokens=5", 'train.sample_prompt="a"']
    out, err = command(*arguments, code=2)
    assert "train.sample_tokens = 5" in err and "no tokenizer 'words'" in err
    assert out == "" and "step 1" not in err


@pytest.mark.parametrize("size", [10**9, 10**18])
def test_a_microbatch_beyond_all_memory_is_refused_before_it_is_allocated(
    command: Command, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def offload_job(*arguments: object) -> None:
        pytest.fail("it is on the way to allocate")

    monkeypatch.setattr("offloadtrain.train.build.offload_job", offload_job)
    out, err = command("train", "job.toml", "--set", f"train.micro_batch={size}", code=4)
    line = only_line(err)
    assert out == "" and "small does not fit: the host (step) needs" in line
    assert "activations" in line and "offloadtrain plan" in line
