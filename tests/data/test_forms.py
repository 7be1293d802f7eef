"""Records of every kind of file and of every form: their tokens, and which of them count."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from offloadtrain.data import records
from offloadtrain.data.prepare import prepare
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError, TokenFile
from tests.data import tiny

Rows = list[dict[str, Any]]
TEXTS: Rows = [
    {"id": n, "text": text}
    for n, text in enumerate(
        ["the cat", 'a "hat", and\nthe cat', "\u00e9\u4e2d", "what is it?" * 20, "it"] * 30
    )
]
CHAT = [
    {"role": "system", "content": "what"},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "and the hat"},
    {"role": "assistant", "content": "it is the hat, the hat"},
]


def _jsonl(path: Path, rows: Rows) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _csv(path: Path, rows: Rows, suffix: str = ".csv") -> Path:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], delimiter="\t" if suffix == ".tsv" else ",")
    writer.writeheader()
    writer.writerows(rows)
    path.with_suffix(suffix).write_bytes(text.getvalue().encode())
    return path.with_suffix(suffix)


def _tsv(path: Path, rows: Rows) -> Path:
    return _csv(path, rows, ".tsv")


def _parquet(path: Path, rows: Rows) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=37)
    return path


def _arrow(path: Path, rows: Rows) -> Path:
    import pyarrow as pa

    path, table = path.with_suffix(".arrow"), pa.Table.from_pylist(rows)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=41)
    return path


def _datasets(path: Path, rows: Rows) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)
    return path


def _hub(path: Path, rows: Rows) -> str:
    path.mkdir()
    _jsonl(path / "train", rows)
    return f"hf:{path}"


KINDS: dict[str, Callable[[Path, Rows], Any]] = {
    "jsonl": _jsonl,
    "csv": _csv,
    "tsv": _tsv,
    "parquet": _parquet,
    "arrow": _arrow,
    "datasets": _datasets,
    "hub": _hub,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def documents(path: Path | None) -> list[tuple[list[int], list[int]]]:
    """Return (tokens, mask) of each document."""
    assert path is not None
    file = tiny.scanned(path)
    counted = np.ones(len(file), np.uint8) if file.counted is None else file.counted
    ends = file.document_ends()
    parts = zip(np.split(file.tokens, ends)[:-1], np.split(counted, ends)[:-1], strict=True)
    return [(tokens.tolist(), mask.tolist()) for tokens, mask in parts]


def counted_text(words: Any, ids: list[int], mask: list[int]) -> str:
    """Return the text of the tokens that count."""
    return str(words.decode([token for token, counts in zip(ids, mask, strict=True) if counts]))


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tsv", "arrow", "datasets", "hub")]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", *SLOW])
def test_every_kind_of_file_gives_the_same_documents(
    tmp_path: Path, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", 900)
    source = KINDS[kind](tmp_path / "data", TEXTS)
    files = prepare(source, tmp_path / "out", tokenizer=str(folder), val_fraction=0.2)
    words = AutoTokenizer.from_pretrained(folder)
    expected = [[*words(row["text"])["input_ids"], words.eos_token_id] for row in TEXTS]
    both = documents(files.train) + documents(files.val)
    assert sorted(ids for ids, _ in both) == sorted(expected)
    assert files.val_documents and files.val_documents + files.train_documents == len(TEXTS)
    train = prepare(source, tmp_path / "all", tokenizer=str(folder), val_fraction=0.0).train
    assert [ids for ids, _ in documents(train)] == expected
    assert prepare(source, tmp_path / "all", tokenizer=str(folder), val_fraction=0.0).reused


def chat_rows(count: int = 12) -> Rows:
    return [
        {"messages": [*CHAT, {"role": "user", "content": f"{n}"}][: 5 + n % 2]}
        for n in range(count)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_conversations_are_those_of_the_template(tmp_path: Path, kind: str, folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    rows = chat_rows()
    source = KINDS[kind](tmp_path / "data", rows)
    files = prepare(source, tmp_path / "out", tokenizer=str(folder), val_fraction=0.0)
    for row, (ids, mask) in zip(rows, documents(files.train), strict=True):
        rendered = words.apply_chat_template(
            row["messages"],
            chat_template=tiny.MARKED,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert ids == rendered["input_ids"]
        assert mask == rendered["assistant_masks"]
        answers = counted_text(words, ids, mask)
        assert answers == "the cat<|im_end|>\nit is the hat, the hat<|im_end|>\n"


def test_marks_and_parts_of_the_template_are_used(tmp_path: Path) -> None:
    """Parts: as templates of models that see pictures read them."""
    marked = tiny.MARKED.replace(
        "+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    folder = tiny.folder(tmp_path / "t", template=marked)
    source, out = _jsonl(tmp_path / "a", chat_rows(1)), tmp_path / "out"
    files = prepare(source, out, tokenizer=str(folder), val_fraction=0.0)
    ((ids, mask),) = documents(files.train)
    assert counted_text(tokenizer(str(folder)), ids, mask) == "the catit is the hat, the hat"

    reads_parts = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    folder = tiny.folder(tmp_path / "t2", template=reads_parts)
    results = []
    for content in ([{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}], "the cat"):
        source = _jsonl(
            tmp_path / "a", [{"messages": [{"role": "user", "content": content}, CHAT[2]]}]
        )
        files = prepare(source, out, tokenizer=str(folder), val_fraction=0.0)
        results.append(documents(files.train))
    assert results[0] == results[1]


def test_another_tokenizer_or_template_is_another_result(tmp_path: Path, folder: Path) -> None:
    """A template in a file replaces that of the tokenizer."""
    source, out = _jsonl(tmp_path / "a", chat_rows()), tmp_path / "out"
    plain = prepare(source, out, tokenizer=str(folder))
    expected = documents(plain.train)
    assert not plain.reused and prepare(source, out, tokenizer=str(folder), jobs=1).reused
    (tmp_path / "own.jinja").write_text(tiny.MARKED)
    tiny.backend().save(str(tmp_path / "tokenizer.json"))
    other = tiny.folder(tmp_path / "t", template=tiny.MARKED)
    assert not prepare(source, out, tokenizer=str(other)).reused
    header = TokenFile(out / "train.bin").header
    assert header.tokenizer == str(other) and header.masked
    template = str(tmp_path / "own.jinja")
    for name in (folder, tmp_path / "tokenizer.json"):
        files = prepare(source, tmp_path / "out2", tokenizer=str(name), chat_template=template)
        assert documents(files.train) == expected


CHAT_PROBLEMS: dict[str, tuple[str | None, Any, str]] = {
    "forgetful": (
        tiny.FORGETFUL,
        CHAT,
        r"not prefix-stable: the messages before number 3 alone .*generation",
    ),
    "nobody answers": (tiny.CHATML, CHAT[:2], "no message of the assistant"),
    "the assistant begins": (tiny.CHATML, CHAT[2:], "the assistant speaks first"),
    "no content": (tiny.CHATML, [{"role": "assistant"}], "message number 1, an answer, is empty"),
    "refused": ("{{ raise_exception('never') }}", CHAT, r"refuses it \(never\)"),
    "no role": (tiny.CHATML, [{"content": "a"}], 'each message must be {"role"'),
    "text": (tiny.CHATML, "what", r"no conversation: it needs .*there is 'messages'"),
    "no speaker": (tiny.CHATML, [{"value": "a"}], '{"from": ..., "value": ...}'),
    "parts": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        [CHAT[1], {"role": "assistant", "content": [{"type": "image"}, {"text": "hi"}]}],
        "content of message number 2 is not text alone, and the chat template does not read it",
    ),
    "no template": (None, CHAT, "has no chat template: name a Jinja file"),
}


def test_a_conversation_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    for number, (template, messages, problem) in enumerate(CHAT_PROBLEMS.values()):
        folder = tiny.folder(tmp_path / f"t{number}", template=template)
        source = _jsonl(tmp_path / "a", [{"messages": messages}])
        with pytest.raises(DataError, match=problem):
            prepare(source, tmp_path / "out", tokenizer=str(folder), form="chat", val_fraction=0.0)


def _sharegpt(system: str, turns: Rows) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    spoken = [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]
    return {"id": "x1", "system": system, "conversations": spoken}


def test_conversations_as_people_have_them(tmp_path: Path, folder: Path) -> None:
    """ShareGPT and Alpaca give the tokens and counts of the same `messages`; bad rows are left out
    by number, with the reason, also beside good ones of another shape."""
    question = {"role": "user", "content": "what is it?\n\nthe hat"}
    alone = {"role": "user", "content": "what is it?"}
    answer = {"role": "assistant", "content": "the cat"}
    alpaca = {"instruction": "what is it?", "output": "the cat"}
    in_turns = [{"from": "system", "value": "what"}, *_sharegpt("", CHAT[1:])["conversations"]]
    in_parts = [
        {"role": turn["role"], "content": [{"type": "text", "text": x} for x in turn["content"]]}
        for turn in CHAT
    ]
    shapes: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
        (_sharegpt("what", CHAT[1:]), CHAT),
        ({"conversations": in_turns}, CHAT),
        ({"conversations": CHAT}, CHAT),
        ({"id": 7, "conversation": CHAT}, CHAT),
        ({"messages": in_parts}, CHAT),
        ({**alpaca, "input": "the hat"}, [question, answer]),
        ({**alpaca, "input": ""}, [alone, answer]),
        ({**alpaca, "input": None, "messages": None}, [alone, answer]),
        ({**alpaca, "system": "the"}, [{"role": "system", "content": "the"}, alone, answer]),
    ]
    for number, (shape, messages) in enumerate(shapes):
        both = []
        for name, row in (("shape", shape), ("messages", {"messages": messages})):
            source = _jsonl(tmp_path / f"{name}{number}", [row])
            out = tmp_path / f"{name}{number}"
            prepared = prepare(source, out, tokenizer=str(folder), val_fraction=0.0)
            both.append(documents(prepared.train))
        assert both[0] == both[1] and both[0][0]
    bad = [{"conversations": [{"from": "human", "value": "hi"}]}, {"instruction": "what is it?"}]
    rows = [shapes[0][0], bad[0], shapes[3][0], bad[1], {"messages": CHAT}]
    source = _jsonl(tmp_path / "mixed", rows)
    with pytest.raises(
        DataError, match=r"mixed.jsonl:2: no message .*\nCorrect it, or let `prepare --bad-lines"
    ):
        prepare(source, tmp_path / "out", tokenizer=str(folder), val_fraction=0.0)
    prepared = prepare(
        source, tmp_path / "out", tokenizer=str(folder), val_fraction=0.0, bad_lines="skip"
    )
    assert prepared.train_documents == 3 and prepared.skipped_lines == 2
    second, fourth = prepared.skipped
    assert "mixed.jsonl:2: no message of the assistant" in second
    assert "mixed.jsonl:4: no conversation" in fourth and "there is 'instruction'" in fourth
    blank = {"type": "text", "text": " "}
    nulls = [
        ({**alpaca, "input": 5}, "its input is no text: 5"),
        ({"conversations": [*in_turns[:2], {"from": "gpt", "value": None}]}, "each message must"),
        ({**alpaca, "output": " \n"}, "message number 2, an answer, is empty"),
        ({"messages": [question, {"role": "assistant", "content": None}]}, "number 2, an answer"),
        ({"prompt": [question], "completion": [{**answer, "content": ""}]}, "an answer, is empty"),
        ({"prompt": "what?", "completion": ""}, "its completion is empty"),
        ({"messages": [question, {**answer, "content": [blank, blank]}]}, "2, an answer, is empty"),
    ]
    for number, (row, problem) in enumerate(nulls):
        source = _jsonl(tmp_path / f"null{number}", [row])
        with pytest.raises(DataError, match=problem) as raised:
            prepare(source, tmp_path / "out", tokenizer=str(folder), val_fraction=0.0)
        assert "--bad-lines" not in str(raised.value), "it may leave out all records"
    source = _jsonl(tmp_path / "one", rows[:2])
    message = r"single document.*--val-fraction 0.*skipped\)\nleft out: .*:2: no"
    with pytest.raises(DataError, match=message):
        prepare(source, tmp_path / "one", tokenizer=str(folder), bad_lines="skip")


def test_parts_of_text_are_joined_where_a_template_writes_lists_out(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    folder = tiny.folder(tmp_path / "t", template=template)
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
    both = []
    for name, messages in (("parts", parts), ("texts", CHAT)):
        source = _jsonl(tmp_path / name, [{"messages": messages}])
        prepared = prepare(source, tmp_path / name, tokenizer=str(folder), val_fraction=0.0)
        both.append(documents(prepared.train))
    assert both[0] == both[1]


def test_fields_of_other_shapes_get_a_remedy(tmp_path: Path, folder: Path) -> None:
    """One line for each, with file, line, reason, and what to do. What JSON lines may have besides
    (a byte order mark, CR LF, blank lines at the end) changes nothing."""
    question, answer = {"role": "user", "content": "what"}, {"role": "assistant", "content": "it"}
    cases = [
        ({"prompt": "what", "response": "it"}, "or rename a question to prompt and its answer to"),
        ({"prompt": "what", "chosen": "it", "rejected": "a"}, "are preferences: examples/dpo.py"),
        (
            {"data": {"messages": [question, answer]}},
            "there is 'data': conversations are read from",
        ),
        ([question, answer], r'not a JSON object, such as {"text": ...} or {"messages": '),
    ]
    for number, (row, problem) in enumerate(cases):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError, match=rf"{number}\.jsonl:1: .*{re.escape(problem)}"):
            prepare(tmp_path / f"{number}.jsonl", tmp_path / "out", tokenizer=str(folder))
    lines = [json.dumps({"messages": [question, answer]}) for _ in range(1000)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\r\n".join(lines) + "\r\n\n \n")
    assert (
        prepare(
            tmp_path / "a.jsonl", tmp_path / "a", val_fraction=0.0, tokenizer=str(folder)
        ).train_documents
        == 1000
    )
    lines[617] = json.dumps({"messages": [question]})
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"b\.jsonl:618: no message of the assistant"):
        prepare(tmp_path / "b.jsonl", tmp_path / "out", tokenizer=str(folder))


def test_a_source_that_cannot_be_used_is_named(tmp_path: Path, folder: Path) -> None:
    turns = _jsonl(tmp_path / "a", [{"conversations": [{"from": "human", "value": "hi"}]}])
    chats = _jsonl(tmp_path / "b", chat_rows())
    (tmp_path / "s").mkdir()
    _jsonl(tmp_path / "s" / "a", chat_rows())
    (tmp_path / "s" / "notes.txt").write_text("some notes")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9 and more")
    cases = [
        (turns, str(folder), r"a\.jsonl:1: no message of the assistant"),
        (chats, "bytes", "conversations need a chat template, and tokenizer 'bytes'"),
        (tmp_path / "s", str(folder), r"notes\.txt is text, and the records .* 'chat'"),
        (tmp_path / "c.txt", str(folder), r"c\.txt is not UTF-8 at byte 3: convert it"),
    ]
    for suffix in (".parquet", ".arrow", ".csv"):
        picture = tmp_path / f"a{suffix}"
        picture.write_bytes(b"\x89PNG\r\n" + bytes(range(256)) * 9)
        cases.append((picture, "bytes", rf"a\{suffix} (cannot be read|is a PNG image)"))
    for source, name, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(source, tmp_path / "out", tokenizer=name, val_fraction=0.0)


@pytest.mark.slow  # importing TRL takes seconds
def test_the_completion_counts_as_in_trl(tmp_path: Path) -> None:
    from trl.trainer.sft_trainer import common_prefix_length

    prompts = ("what is it? ", "what is it?", "th", "")
    rows = [{"prompt": prompt, "completion": "the cat"} for prompt in prompts]
    for begin in ("", "<s>"):
        folder = tiny.folder(tmp_path / f"t{begin}", begin=begin)
        words = AutoTokenizer.from_pretrained(folder)
        source = _csv(tmp_path / "a", rows)
        files = prepare(source, tmp_path / "out", tokenizer=str(folder), val_fraction=0.0)
        for prompt, (ids, mask) in zip(prompts, documents(files.train), strict=True):
            expected = words(prompt + "the cat" + words.eos_token)["input_ids"]
            length = common_prefix_length(words(prompt)["input_ids"], expected)
            assert ids == expected
            assert mask == [0] * length + [1] * (len(expected) - length)


def test_the_completion_of_bytes_and_of_messages_counts(tmp_path: Path, folder: Path) -> None:
    source = _jsonl(tmp_path / "a", [{"prompt": "ab", "completion": "c"}])
    files = prepare(source, tmp_path / "out", val_fraction=0.0)
    assert documents(files.train) == [([97, 98, 99, 0], [0, 0, 1, 1])]
    words = AutoTokenizer.from_pretrained(folder)
    source = _jsonl(tmp_path / "a", [{"prompt": CHAT[:4], "completion": CHAT[4:]}])
    files = prepare(source, tmp_path / "out", tokenizer=str(folder), val_fraction=0.0)
    ((ids, mask),) = documents(files.train)
    assert ids == words.apply_chat_template(CHAT)["input_ids"]
    assert counted_text(words, ids, mask) == "it is the hat, the hat<|im_end|>\n"
