"""A job on conversations, from JSONL and a tokenizer's folder to a sample; and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from offloadtrain.cli.main import main
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.data.prepare import prepare
from offloadtrain.data.tokens import TokenFile
from offloadtrain.events import schema
from offloadtrain.model.language_model import OwnModel
from offloadtrain.train.build import assemble
from tests.conftest import Command
from tests.data import tiny
from tests.train.small_job import events_of, run, small_job

pytestmark = pytest.mark.slow
CHAT = ("train.sample_tokens=4", "train.sample_prompt='<|im_start|>'", "model.vocab_size=304")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    lines = []
    for a in range(40):
        question = {"role": "user", "content": f"what is {a} and {a}?"}
        answer = {"role": "assistant", "content": f"it is {2 * a}"}
        lines.append(json.dumps({"messages": [question, answer] * (1 + a % 2)}) + "\n")
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    return tmp_path / "chats.jsonl"


def chat_job(folder: Path, *overrides: str) -> Config:
    source = (f"data.source='{folder}/chats.jsonl'", f"data.tokenizer='{folder}/t'")
    return small_job(folder, *source, *CHAT, *overrides)


def test_a_job_trains_on_conversations_and_goes_on(tmp_path: Path, chats: Path) -> None:
    tiny.folder(tmp_path / "t")
    path, packing = tmp_path / "run", "data.packing=padded"
    assert run(chat_job(tmp_path, packing, "train.steps=20"), path) == 0
    losses = [event.val_loss for event in events_of(path, schema.Eval)]
    assert losses[-1] < losses[0] - 1.0
    assert run(chat_job(tmp_path, packing, "train.steps=24"), path, resume=str(path)) == 0
    assert events_of(path, schema.Step)[-1].step == 24

    other = tiny.folder(tmp_path / "other", begin="<s>")
    job = chat_job(tmp_path, packing, "train.steps=28", f"data.tokenizer='{other}'")
    with pytest.raises(ConfigError, match="trained on tokens of another tokenizer"):
        run(job, path, resume=str(path))


def test_a_question_is_rendered_by_the_template(
    tmp_path: Path,
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Command,
) -> None:
    """And the answer alone is printed, up to the end of the assistant's turn. A model without a
    template answers none."""
    folder = tiny.folder(tmp_path / "t")
    assert run(chat_job(tmp_path, "data.packing=padded", "train.steps=2"), tmp_path / "run") == 0
    words = transformers.AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "what is 4 and 4?"}]
    rendered = words.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    prompts = []

    def generate(self: OwnModel, tokens_BT: torch.Tensor, *_: object) -> torch.Tensor:
        prompts.append(tokens_BT.tolist())
        answer = words("it is 8")["input_ids"]
        return torch.tensor([[*tokens_BT[0].tolist(), *answer, words.eos_token_id, *answer]])

    monkeypatch.setattr(OwnModel, "generate", generate)
    capsys.readouterr()
    assert main(["generate", f"{tmp_path}/run", "--chat", "--prompt", "what is 4 and 4?"]) == 0
    assert prompts == [[rendered]]
    assert capsys.readouterr().out == "it is 8\n"
    assert run(small_job(tmp_path, "train.steps=2"), tmp_path / "bytes") == 0
    assert (
        "tokenizer 'bytes' cannot have one"
        in command("generate", f"{tmp_path}/bytes", "--chat", "--prompt", "a", code=2).err
    )


def test_an_exported_folder_is_evaluated_as_its_job_was(
    tmp_path: Path, chats: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    """The loss over the counted tokens of each conversation alone, as a plain loop has it."""
    tiny.folder(tmp_path / "t")
    assert run(chat_job(tmp_path, "data.packing=padded", "train.steps=2"), tmp_path / "run") == 0
    (val,) = tmp_path.rglob("val.bin")
    tokens = TokenFile(val)
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/out", "--dtype", "fp32"]) == 0
    assert tokens.counted is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    total, counted, begin = 0.0, 0, 0
    for end in tokens.document_ends():
        ids_T = torch.from_numpy(tokens.tokens[begin:end].astype(int))[:33]
        counts_T = torch.from_numpy(tokens.counted[begin:end].astype(bool))[:33][1:]
        begin = end
        with torch.no_grad():
            logits_TV = model(ids_T[None, :-1]).logits[0].float()
        total += F.cross_entropy(logits_TV[counts_T], ids_T[1:][counts_T], reduction="sum").item()
        counted += int(counts_T.sum())
    results = []
    for options in ([], ["--packing", "padded"], ["--packing", "stream"]):
        capsys.readouterr()
        evaluation = ["eval", f"{tmp_path}/out", "--data", f"{val}", "--seq-len", "32"]
        results.append(json.loads(command(*evaluation, *options, "--json").out))
    assert results[0] == results[1] and results[0]["tokens"] == counted > 0
    assert results[0]["loss"] == pytest.approx(total / counted, rel=1e-4)
    assert results[2]["loss"] != results[0]["loss"]
    for name, begin, code in (("moved", "", 0), ("other", "<s>", 2)):
        data = tmp_path / f"data-{name}"
        prepare(chats, data, tokenizer=str(tiny.folder(tmp_path / name, begin=begin)))
        for model in ("run", "out"):
            evaluation = ["eval", f"{tmp_path}/{model}", "--data", f"{data}/val.bin"]
            assert main([*evaluation, "--seq-len", "32"]) == code
    assert capsys.readouterr().err.count("was prepared with another tokenizer") == 2


def test_files_of_another_tokenizer_are_refused(tmp_path: Path, chats: Path) -> None:
    for name, begin in (("t", ""), ("u", "<s>")):
        folder = str(tiny.folder(tmp_path / name, begin=begin))
        prepare(chats, tmp_path / f"data-{name}", tokenizer=folder)

    def job(val: str, *overrides: str) -> Config:
        files = (
            f"data.train='{tmp_path}/data-t/train.bin'",
            f"data.val='{tmp_path}/{val}/val.bin'",
        )
        return small_job(tmp_path, "data.source=''", *files, *CHAT, *overrides)

    with pytest.raises(ConfigError, match=r"data-u/val.bin is of another tokenizer"):
        assemble(job("data-u"))
    with pytest.raises(ConfigError, match=r"was prepared with another one .*leave data.tokenizer"):
        assemble(job("data-t", f"data.tokenizer='{tmp_path}/u'"))
    assemble(job("data-t", f"data.tokenizer='{tmp_path}/t'")).optimizer.close()
    tiny.folder(tmp_path / "t", begin="<s>")
    with pytest.raises(ConfigError, match=r"is another one by now; set train.sample_tokens = 0"):
        assemble(job("data-t"))
