"""Damaged and made-up files through every reader: one of its own errors or a value, nothing else.

`pytest tests/boundary/test_fuzz.py --level full -s` runs and prints the full set.
"""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from offloadtrain_tui.reading.history import History
from offloadtrain_tui.reading.view import View

from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.hf_model import identity_of, shape_of
from offloadtrain.data import records, tokens
from offloadtrain.data.tokens import DataError, TokenHeader
from offloadtrain.events import log_lines, oom_kills
from offloadtrain.events.control import _parsed
from offloadtrain.hardware import machine
from offloadtrain.train import saved_state
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import MANIFEST, STATE, CheckpointError
from offloadtrain.train.checkpoint.save import save
from offloadtrain.train.progress import Progress
from offloadtrain.train.saved_state import require_run_state
from tests.boundary.hostile import TEXTS
from tests.boundary.hostile_checkpoints import OTHERS, rewrite_state
from tests.cli.test_bad_input import JOB
from tests.train.test_checkpoint import change
from tests.train.toy_state import filled
from tests.tui.recordings import lines, unlucky

JSONL = b'{"text": "some text", "n": [1, 2.5, null, true], "more": {"a": "\\u00e9"}}'
REQUEST = b'{"action": "note", "message": "x", "time_s": 1.5}'
HF = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
    }
).encode()
_HEADER: dict[str, Any] = {
    "dtype": "uint16",
    "vocab_size": 256,
    "count": 4,
    "tokenizer": "bytes",
    "content": "00",
}
HEADER = json.dumps(asdict(TokenHeader(**_HEADER))).encode()
PIECES = [
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    *(b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b"-1", b"1e999", b"NaN", b"null", b"true", b"{}"),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b'"', b"\\", b"\n", b"=", b"[[", b"]]", b"'''", b"."),
]


def mutated(seed: bytes, draw: random.Random) -> bytes:
    content = bytearray(seed)
    for _ in range(draw.randint(1, 6)):
        at, end = sorted(draw.randint(0, len(content)) for _ in range(2))
        change = draw.randrange(6)
        if change == 0 and content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif change == 1:
            del content[at : min(end, at + 40)]
        elif change == 2:
            content[at:at] = draw.choice(PIECES)
        elif change == 3:
            content[at : min(end, at + 20)] = draw.choice(PIECES)
        elif change == 4:
            content[at:at] = content[at : min(end, at + 60)]
        else:
            content = content[: max(at, 1)]
    return bytes(content)


def _log(content: bytes) -> None:
    history = History(0)
    history.feed_lines(content.split(b"\n"))
    view = View.at(history)
    assert view.last("loss") is None or isinstance(view.last("loss"), float)
    for line in content.split(b"\n"):
        log_lines.from_line(line)


def _header(content: bytes) -> None:
    prefix = tokens.PREFIX.pack(tokens.MAGIC, tokens.VERSION, len(content))
    page = (prefix + content).ljust(tokens.HEADER_BYTES, b"\0")[: tokens.HEADER_BYTES]
    header = tokens._parse_header(Path("t.bin"), page)
    tokens._check_size(Path("t.bin"), header, 8)


def _requests(content: bytes) -> None:
    _parsed("id", json.loads(content))
    oom_kills.risen(json.loads(content))


def _config(content: bytes) -> None:
    result = json.loads(content)
    if not isinstance(result, dict):  # as `read_config` says
        raise ValueError("no object")
    identity_of(result)
    shape_of(result)


def _checkpoint(file: str, content: bytes) -> None:
    """A file of a checkpoint, exchanged: as it is, and with hashes that fit where they can."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copytree(_saved().parent, Path(folder, "run"))) / _saved().name
        (path / file).write_bytes(content)
        if file == STATE:
            rewrite_state(path, content)
        else:
            with suppress(ValueError, RecursionError, TypeError):
                change(path / file, lambda manifest: manifest.update())
        require_run_state(checkpoint.verify(path))


def _values(file: str, content: bytes) -> None:
    """Values of a checkpoint's file that are exchanged as the content draws them."""
    draw = random.Random(content)
    result = json.loads((_saved() / file).read_text())
    for _ in range(draw.randint(1, 3)):
        _exchange(result, draw)
    _checkpoint(file, json.dumps(result).encode())


def _exchange(value: Any, draw: random.Random) -> None:
    """Exchange a value anywhere inside a table or a list."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8:
        _exchange(value[key], draw)
    elif draw.random() < 0.2:
        del value[key]
    else:
        values = (*OTHERS, draw.randrange(100_000), value[draw.choice(keys[:20])])
        value[key] = deepcopy(draw.choice(values))


@cache
def _saved() -> Path:
    """A checkpoint of a run."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    progress = {**asdict(Progress(step=1)), "val_loss": None}
    state = {
        "optimizer": {"step": 1, "scaler": None},
        "progress": progress,
        "data": {"seed": 1, "epoch": 0, "sample": 3, "data": {"order": "full"}},
        "spikes": {"losses": [1.5, 1.25], "rollbacks": [[3, 1]]},
        "held_out": None,
        "tokenizer": "bytes",
        "tokenizer_name": "bytes",
        "rng": [saved_state.random_states().as_json],
        "precision": "bf16",
        "threads": 1,
        "config": {"offload": {"clip_norm": 1.0}},
        "hf_config": None,
    }
    return save(folder, 1, *filled(1), state).path


RECORDS = lines(unlucky(6))
READERS: dict[str, tuple[Callable[[bytes], object], list[bytes], tuple[type[Exception], ...]]] = {
    "job": (lambda b: jobs.loads(b.decode(errors="replace")), [JOB.encode()], (ConfigError,)),
    "machine": (
        lambda b: machine.loads(b.decode(errors="replace"), "m.toml"),
        [path.read_bytes() for path in sorted(machine.shipped().values())[:3]],
        (ConfigError,),
    ),
    "log": (_log, RECORDS, ()),
    "jsonl": (lambda b: records._parse_line(b, len(b)), [JSONL], (ValueError,)),
    "token file": (_header, [HEADER], (DataError,)),
    "request": (_requests, [REQUEST], (ValueError, RecursionError)),
    "manifest.json": (
        partial(_checkpoint, MANIFEST),
        [(_saved() / MANIFEST).read_bytes()],
        (CheckpointError,),
    ),
    "state.json": (
        partial(_checkpoint, STATE),
        [(_saved() / STATE).read_bytes()],
        (CheckpointError,),
    ),
    "a manifest's values": (partial(_values, MANIFEST), [], (CheckpointError,)),
    "a state's values": (partial(_values, STATE), [], (CheckpointError,)),
    "config.json": (_config, [HF], (ValueError, RecursionError)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [150, pytest.param(4000, marks=pytest.mark.long)], ids=["a slice", "all"]
)
@pytest.mark.parametrize("reader", READERS)
def test_no_content_breaks_a_reader(reader: str, cases: int) -> None:
    read, seeds, known = READERS[reader]
    for seed in seeds:
        read(seed)
    draw, refused = random.Random(f"{reader} {cases}"), 0
    for number in range(cases):
        content = mutated(draw.choice(seeds), draw) if seeds else draw.randbytes(8)
        try:
            read(content)
        except known:
            refused += 1
        except Exception as error:
            pytest.fail(f"case {number}: {content[:300]!r}: {error!r}")
    print(f"{reader}: {cases} cases, {refused} refused in its own words, 0 tracebacks")
