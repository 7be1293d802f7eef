"""The table of architectures: what its cells find, and what the command prints and returns."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadtrain as ot
from benchmarks.architectures import __main__ as command
from benchmarks.architectures import training
from benchmarks.architectures.cells import CELLS, SAME, Case, deviation
from benchmarks.architectures.models import ARCHITECTURES
from offloadtrain.engine import ModelError, optimizer
from tests import levels

ROOT = Path(__file__).resolve().parents[2]
# a padding mask, a key-value cache with a window, an encoder beside a decoder, experts, images,
# diffusion, running statistics, a state in attributes of modules
SLICE = ("llama_padded", "mistral", "t5", "mixtral", "vit", "sd3", "resnet", "recurrent_gemma")
WITHOUT_LAYERS = ("albert",)  # its layers are one, called again and again: nothing to stream


def test_129_architectures_and_one_with_padding_are_on_the_page() -> None:
    """None of them is refused."""
    assert len(ARCHITECTURES) == 130
    assert {name for name in ARCHITECTURES if name.endswith("_padded")} == {"llama_padded"}
    assert not [name for name, item in ARCHITECTURES.items() if item.impossible]
    page = (ROOT / "docs/architectures.md").read_text()
    assert {name for name in (*ARCHITECTURES, *CELLS) if f"`{name}`" not in page} == set()


@pytest.mark.slow
def test_each_is_a_class_of_its_own() -> None:
    with torch.device("meta"):
        classes = Counter(type(item.build()) for item in ARCHITECTURES.values())
    assert {kind.__name__ for kind, rows in classes.items() if rows > 1} == {"LlamaForCausalLM"}


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("name", (*SLICE, *WITHOUT_LAYERS))
def test_streaming_has_more_blocks_than_slots(name: str) -> None:
    offloaded = ot.offload(training.build(ARCHITECTURES[name]), device="cpu", working="host")
    streamed = [b for b in offloaded._blocks if any(bucket.sources for bucket in b.all_buckets)]
    offloaded.close()
    assert (len(streamed) > 2) is (name not in WITHOUT_LAYERS)


def test_a_wrong_update_fails_in_fp32_and_is_not_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("lstm", steps=2)
    assert case.plain and case.base
    assert case.fill("host").shown == SAME
    monkeypatch.setitem(training.ADAMW, "lr", 3.1e-4)
    filled = case.fill("fp32")
    assert not filled.passed
    assert filled.deviation is not None and 1e-6 < filled.deviation < 1e-3
    filled = case.fill("host")
    assert (filled.passed, filled.shown) == (False, "differs")
    assert re.match(r"a loss of step 2 is \S+ and without it", filled.why)


def test_a_run_without_training_fails_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama", steps=3)
    assert case.plain and case.autocast
    masters = training.train_masters(case.architecture, case.steps)
    assert 0 < deviation(masters, case.plain) < 5e-3
    monkeypatch.setitem(training.ADAMW, "lr", 0.0)
    filled = case.fill("bf16")
    assert not filled.passed
    assert filled.deviation is not None and filled.deviation > 5e-3
    deviation_of_bf16 = re.search(r"masters of the model in bf16 is (\S+) off", filled.why)
    assert deviation_of_bf16 and float(deviation_of_bf16[1]) > 5e-3


def test_a_skipped_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = training.loss_of

    def infinite(*args: Any) -> Any:
        return honest(*args) * float("inf")

    case = Case("lstm", steps=1)
    monkeypatch.setattr(training, "loss_of", infinite)
    filled = case.fill("host")
    assert (filled.passed, filled.shown) == (False, "SkippedError")
    assert "gradient norm" in filled.why


def test_a_refusal_passes_only_where_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ModelError("not this one")

    monkeypatch.setattr(optimizer.OffloadOptimizer, "__init__", refuse)
    filled = Case("lstm", steps=1).fill("fp32")
    assert (filled.passed, filled.shown, filled.why) == (False, "refused", "not this one")
    announced = replace(ARCHITECTURES["lstm"], impossible={"fp32": "a reason"})
    filled = Case("lstm", steps=1, architecture=announced).fill("fp32")
    assert (filled.passed, filled.shown, filled.why) == (True, "refused", "a reason: not this one")


def test_the_command_prints_a_table_and_writes_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "found.json"
    arguments = ["--only", "lstm", "encoder", "--cells", "fp32", "host", "--steps", "1"]
    assert command.main([*arguments, "--json", str(record)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["| architecture | fp32 | host |", "|---|---|---|"]
    assert [line.split(" | ")[0] for line in printed[2:4]] == ["| lstm", "| encoder"]
    assert printed[-1] == "4 of 4 cells pass, 0 of them refused."
    written = json.loads(record.read_text())
    assert written["run"]["steps"] == 1
    assert set(written["run"]["versions"]) >= {"torch", "transformers", "diffusers"}
    assert [(cell["architecture"], cell["cell"], cell["passed"]) for cell in written["cells"]] == [
        (name, cell, True) for name in ("lstm", "encoder") for cell in ("fp32", "host")
    ]


def test_an_interrupted_table_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first row is there; the second is trained, and nothing else."""
    trained: list[str] = []
    honest = Case.fill

    def interrupted(self: Case, cell: str) -> Any:
        trained.append(self.name)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return honest(self, cell)

    monkeypatch.setattr(Case, "fill", interrupted)
    arguments = ["--only", "lstm", "encoder", "--cells", "fp32", "--steps", "1", "--resume"]
    arguments += ["--json", str(tmp_path / "found.json")]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    assert command.main(arguments) == 0
    assert trained == ["lstm", "encoder", "encoder"]
    assert "2 of 2 cells pass" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*arguments, "--steps", "2"])
    assert "has steps 1; asked is 2" in capsys.readouterr().err


def test_the_command_fails_with_a_cell_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*args: Any, **options: Any) -> None:
        raise RuntimeError("something\nbroke")

    monkeypatch.setattr(optimizer.OffloadOptimizer, "__init__", break_down)
    assert command.main(["--only", "lstm", "--cells", "host", "--steps", "1"]) == 1
    printed = capsys.readouterr().out
    assert "| lstm | **RuntimeError** |" in printed
    assert printed.endswith("lstm host: RuntimeError: something broke\n")


@pytest.fixture(scope="module", params=SLICE)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, steps=3)


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("cell", CELLS)
def test_a_slice_of_the_table_passes(case: Case, cell: str) -> None:
    filled = case.fill(cell)
    assert filled.passed, f"{filled.shown}: {filled.why}"
