"""docs/fine_tune_8b.md is followed literally, with a tiny model in the place of the 8B."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from examples.toy import make_llama
from offloadtrain.cli.main import main
from tests.test_readme import ROOT, Captured, blocks

README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "fine_tune_8b.md").read_text()
MODEL = "models/llama-3.1-8b"
JOB = [
    f"offloadtrain prepare chats.jsonl data --tokenizer {MODEL}",
    "offloadtrain train chats.toml",
    "offloadtrain export runs/latest tuned-by-job",
    'offloadtrain generate tuned-by-job --chat --prompt "Where does Adam run?" --temperature 0',
]
PLAN = "offloadtrain plan examples/llama_8b_24gb.toml --machine rtx4090 --host-memory 64GiB"
NOT_RUN = {
    "pip install -c constraints.txt torch && pip install -c constraints.txt -e '.[hf,data]'",
    f"hf download meta-llama/Llama-3.1-8B-Instruct --local-dir {MODEL}",
}
"""They load from the network."""


def test_the_guide_has_no_command_that_is_not_known() -> None:
    commands = {command for block in blocks(GUIDE) for command in block}
    assert commands == {PLAN, "python tune.py", "python ask.py", *JOB} | NOT_RUN


@pytest.mark.slow
def test_the_figures_of_the_guide_are_what_plan_prints(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    cell = r" ([^|]*) \|"
    rows = re.findall(rf"^\| `(\w+)` \|{3 * cell}$", GUIDE, re.MULTILINE)
    assert [state for state, *_ in rows] == ["int8", "split16", "fp32"]
    for state, host, device, time in rows:
        asked = [*PLAN.split()[1:], "--set", f"offload.state={state}"]
        assert main(asked) == (0 if state == "int8" else 4)
        printed = capsys.readouterr().out
        assert f"step {host}" in printed and f"device: {device} of" in printed
        assert f"step: {time}, of which" in printed
    main(PLAN.split()[1:])
    printed = capsys.readouterr().out
    said = r"([\d.]+ GiB) on the device, ([\d.]+ GiB) on the host\s+[^,]*, ([\d.]+k tokens/s)"
    (device, host, rate) = re.findall(said, README)[0]
    assert f"device: {device} of" in printed and f"step {host}" in printed and rate in printed
    others = re.findall(r"([\d.]+) GiB with\s+`(--set [^`]*)`", GUIDE)
    assert len(others) == 2
    for host, settings in others:
        main([*PLAN.split()[1:], *settings.split()])
        assert f"step {host} GiB" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # without a GPU
def test_the_guide_followed_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Only the folder behind `MODEL` is another."""
    import torch  # takes seconds, as the next
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    (chats,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    Path("chats.jsonl").write_text(chats * 40)
    make_llama(MODEL)
    tune, ask = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    ran: dict[str, Any] = {}
    exec(tune, ran)
    losses = [one["loss"] for one in ran["trainer"].state.log_history if "loss" in one]
    assert len(losses) == 20 and losses[-1] < losses[0]
    assert ran["optimizer"].config.state.format == "int8"
    tokens = torch.tensor([[1, 2, 3]], device=ran["optimizer"].device)
    assert ran["model"](input_ids=tokens, labels=tokens).logits is None
    masters = dict(ran["optimizer"].master_weights())
    for name, weight in load_file("tuned/model.safetensors").items():
        assert torch.equal(weight, masters[name].bfloat16()), name
    ran["optimizer"].close()
    capsys.readouterr()
    exec(ask, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # without a GPU
def test_the_job_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Of a tiny model, in shorter sequences and fewer steps at a higher rate."""
    monkeypatch.chdir(tmp_path)
    (chats,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    (job,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
    # Equal conversations would all be trained on, or all be held out.
    Path("chats.jsonl").write_text("".join(chats.replace("?", f"?{n * ' '}") for n in range(40)))
    Path("chats.toml").write_text(job)
    make_llama(MODEL)
    tiny = ["data.seq_len=64", "train.steps=60", "optim.lr=0.01"]
    for command in JOB:
        asked = shlex.split(command)[1:]
        capsys.readouterr()
        assert main([*asked, *(["--set", *tiny] if asked[0] == "train" else [])]) == 0
    # Both answers of the page are learned by heart.
    assert capsys.readouterr().out == "On the CPU.\n"
