"""`offloadtrain plan`: text, JSON, exit codes, the largest model, sweeps, one line for errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.config.units import format_count
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from offloadtrain.plan.search import largest, question, suggest
from offloadtrain.plan.search.largest import MODELS
from tests import levels
from tests.small_buffers import small_doctor

Captured = pytest.CaptureFixture[str]
SMALL = ["--set", "model.size=gpt2-124m", "data.seq_len=512", "offload.precision=fp16"]


def models(*names: str) -> dict[str, ModelShape]:
    """Few, so that a search is short."""
    return {name: MODELS[name] for name in names}


def plan(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def found(capsys: Captured) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_what_is_printed(capsys: Captured) -> None:
    assert plan("gpt_13b_v100", "--machine", "v100_32gb") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in ("13.3B parameters", "working weights", "exp_avg_sq", "init", "checkpoint",
                 "tokens/s", "MFU", "recompute", "bytes per parameter", "73 ms"):  # fmt: skip
        assert part in out
    assert max(map(len, out.splitlines())) < 140
    verdict = out.splitlines()[0]
    assert verdict.startswith("It fits: GPU 28.4 GiB of 31.0 GiB, host 117.0 GiB of 128.0 GiB; ")
    assert "e+0" not in out and "e-0" not in out and " GB " not in out


def test_a_job_is_planned_for_the_machine_that_it_names(capsys: Captured) -> None:
    small = ["--set", "model.num_layers=2"]
    assert plan("gpt_13b_v100", *small) == 0
    of_the_job = capsys.readouterr().out
    assert plan("gpt_13b_v100", "--machine", "v100_32gb", *small) == 0
    assert of_the_job == capsys.readouterr().out
    assert plan("gpt_13b_v100", "--machine", "dgx2", *small) == 0
    assert of_the_job != capsys.readouterr().out


def test_json_sums_up(capsys: Captured) -> None:
    assert plan("demo", "--machine", "dgx2", "--gpus", 4, "--json", *SMALL) == 0
    told = found(capsys)
    assert told["ranks"] == 4 and told["hosts"] == 1 and told["zero_stage"] == 2
    assert told["host_peak_bytes"]["step"] == 4 * sum(told["host_bytes"].values())
    assert told["fits"] and told["problems"] == [] == told["changes"]
    step = told["step"]
    waited = sum(step["exposed_s"].values())
    assert step["seconds"] == pytest.approx(step["busy_s"]["compute"] + waited)


def test_experts_count_in_bytes_and_those_of_a_token_in_flops(capsys: Captured) -> None:
    """A step takes the FLOPs of a model with two experts that all tokens use."""
    told = []
    for experts in (2, 8):
        asked = ["demo_experts", "--machine", "cpu2", "--set", f"model.num_experts={experts}"]
        assert plan(*asked, "--json") == 0
        told.append(found(capsys))
    few, many = told
    assert few["params"] == few["active_params"]
    router = 4 * 6 * 192  # of four layers, for six more experts
    assert many["active_params"] == few["active_params"] + router
    assert many["params"] == few["params"] + 4 * 6 * 3 * 192 * 256 + router
    for owner in ("master weights", "exp_avg"):
        grown = many["host_bytes"][owner] - few["host_bytes"][owner]
        assert grown == 4 * (many["params"] - few["params"])
    flops = [one["step"]["tflops"] * one["step"]["seconds"] * 1e12 for one in told]
    assert flops[1] - flops[0] == pytest.approx(6 * router * many["batch_tokens"])
    assert plan("demo_experts", "--machine", "cpu2") == 0
    shown = capsys.readouterr().out
    assert "5.41M parameters, 1.88M active per token (2 of 8 experts)" in shown


def test_what_does_not_fit_says_what_does(capsys: Captured) -> None:
    arguments = ["demo", "--machine", "v100_32gb", "--gpu-memory", "2GiB", *SMALL]
    assert plan(*arguments) == 4
    out = capsys.readouterr().out
    assert "It does not fit:" in out and "the device needs" in out
    changes = [line.split(" tokens/s  ") for line in out.splitlines() if " tokens/s  " in line]
    rates = [float(before.split()[-1].rstrip("k")) for before, _ in changes]
    assert all("GPU" in before and "host" in before for before, _ in changes)
    assert rates == sorted(rates, reverse=True)
    assert plan(*arguments, *changes[-1][1].split()) == 0


def test_memory_can_be_given(capsys: Captured) -> None:
    assert plan("demo", "--machine", "cpu2", "--host-memory", "100MB") == 4
    assert "the host" in capsys.readouterr().out
    assert plan("demo", "--machine", "cpu2") == 0


@pytest.mark.slow
def test_a_gpu_of_which_only_the_memory_is_told(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(largest, "MODELS", models("Qwen2.5-1.5B", "gpt2-124m"))
    assert plan("--largest", "--gpu-memory", "24GiB", "--host-memory", "64GiB", "--json") == 0
    told = found(capsys)
    assert "no GPU" in told["machine"] or "this machine" in told["machine"]
    for row in told["rows"]:
        assert sum(row["plan"]["device_bytes"].values()) < 24 << 30


def test_this_machine(capsys: Captured) -> None:
    assert plan("demo", "--json") == 0
    assert "this machine" in found(capsys)["machine"]


def test_a_machine_that_was_measured(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_doctor(monkeypatch)
    file = tmp_path / "mine.toml"
    done = main(["doctor", "--quick", "--save", str(file), "--folder", str(tmp_path)])
    assert done in (0, 1) and file.exists()
    capsys.readouterr()
    assert plan("demo", "--machine", file, "--json") == 0
    assert found(capsys)["machine"] == "mine"


@pytest.mark.slow
def test_the_largest_model(capsys: Captured) -> None:
    assert plan("--largest", "--machine", "v100_32gb", "--json") == 0
    rows = {(row["weights"], row["state"]): row for row in found(capsys)["rows"]}
    assert set(rows) == {(w, s) for w in ("device", "host") for s in ("fp32", "int8")}
    for row in rows.values():
        told = row["plan"]
        assert told["fits"] and told["params"] == row["params"] == num_params(MODELS[row["model"]])
        assert told["batch_tokens"] in (32768, 16 * 1024)
    assert rows["device", "int8"]["params"] > rows["device", "fp32"]["params"]


@pytest.mark.slow
def test_no_larger_model_fits() -> None:
    """The next larger ones in every microbatch, whatever is found without a plan of them."""
    machine = find("rtx4090")[1]
    for row in largest.largest("rtx4090", machine):
        assert row.plan is not None and row.plan.fits
        places = {f"offload.{key}": getattr(row, key) for key in ("working", "activation", "state")}
        larger = [name for name, shape in MODELS.items() if num_params(shape) > row.params]
        for name in larger[-2:]:
            job = suggest.applied(question.job_of(name, MODELS[name]), places)
            for size in (16, 8, 4, 2, 1):
                train = {"train.micro_batch": size, "train.grad_accum_steps": 16 // size}
                assert not make(suggest.applied(job, train), "rtx4090", machine).fits, (row, name)


@pytest.mark.slow
def test_the_table_of_cards_is_what_is_found() -> None:
    """One of its rows; all: more than a minute."""
    page = (Path(__file__).parents[2] / "docs/cards.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| `rtx4090` |")]
    rows = {(one.working, one.state): one for one in largest.largest(*find("rtx4090"))}
    shown = [rows["device", "fp32"], rows["device", "int8"], rows["host", "int8"]]
    for one, cell in zip(shown, row.split("|")[4:7], strict=True):
        assert one.plan is not None
        rate = format_count(one.plan.prediction.tokens_per_s)
        assert cell.strip() == f"{one.model}, {rate}"


def test_rows_are_printed_as_they_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "MODELS", models("gpt2-124m"))
    machine, taken = find("rtx4090")[1], []
    rows = (taken.append(row) or row for row in largest.largest("rtx4090", machine))
    lines = largest.table(rows, machine, 1)
    head, first = next(lines), next(lines)
    assert "tokens/s" in head and "gpt2-124m" in first and len(taken) == 1


def test_nothing_fits(capsys: Captured) -> None:
    assert plan("--largest", "--machine", "v100_32gb", "--host-memory", "3GiB") == 4
    assert "-" in capsys.readouterr().out


@pytest.mark.parametrize("keys", [["ranks.tensor=2"], ["ranks.expert=2", "model.num_experts=4"]])
def test_a_sweep_of_divided_jobs(capsys: Captured, keys: list[str]) -> None:
    """From the fewest GPUs that can be divided so; of others it says why not."""
    changes = [part for key in (*keys, "train.sample_tokens=0") for part in ("--set", key)]
    assert (
        main(["plan", "demo", "--machine", "dgx2", "--sweep", "gpus=1,2,4", "--json", *changes])
        == 0
    )
    points = json.loads(capsys.readouterr().out)["points"]
    ours = [point for point in points if point["system"] == "offloadtrain"]
    assert {point["stage"] for point in ours} == {1, 2, 3}
    alone, *others = (point["problem"] for point in ours if point["stage"] == 1)
    assert re.match(rf"{keys[0].replace('=', ' = ')} and 1 rank", alone) and others == ["", ""]


def test_a_sweep(capsys: Captured) -> None:
    arguments = ["demo", "--machine", "dgx2", "--sweep", "gpus=4,1,16,32", *SMALL]
    assert plan(*arguments, "--json") == 0
    points = found(capsys)["points"]
    systems = {(p["system"], p["stage"]) for p in points}
    ours = {("offloadtrain", stage) for stage in (1, 2, 3)}
    pipelines = {("gpipe", 0), ("flush", 0), ("2bw", 0)}
    assert systems == ours | {("resident", stage) for stage in range(4)} | pipelines
    for system in systems:
        line = [p for p in points if (p["system"], p["stage"]) == system]
        counts = [1, 4] if system in pipelines else [1, 4, 16, 32]  # it has 12 layers
        assert [p["gpus"] for p in line] == counts
        rates = [p["tokens_per_s"] for p in line]
        assert rates == sorted(rates) and line[0]["efficiency"] == 1.0
    assert plan(*arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 7 * 4 + 3 * 2


def test_a_sweep_beyond_the_only_host(capsys: Captured) -> None:
    assert plan("demo", "--machine", "rtx4090", "--sweep", "gpus=1,4", "--json", *SMALL[:3]) == 0
    points = found(capsys)["points"]
    ours = {p["gpus"]: p["problem"] for p in points if p["system"] == "offloadtrain"}
    assert ours[1] == "" and "one host" in ours[4]


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("machine", ["rtx3090", "rtx4090"])
def test_two_gpus_of_a_desktop(capsys: Captured, machine: str) -> None:
    """They share its lanes: each of two has half the bandwidth of one alone."""
    told = []
    for gpus in (1, 2):
        assert plan("llama_1b", "--machine", machine, "--gpus", gpus, "--json") == 0
        told.append(found(capsys))
    one, two = told
    assert two["ranks"] == 2 and two["hosts"] == 1
    rates = [run["step"]["d2h_bytes"] / run["step"]["busy_s"]["d2h"] / 1e9 for run in told]
    assert rates == pytest.approx([24, 12], rel=0.02)
    assert 1 < two["step"]["tokens_per_s"] / one["step"]["tokens_per_s"] <= 2
    assert plan("llama_1b", "--machine", machine, "--gpus", 4) == 2
    assert "has 2 on its only host" in capsys.readouterr().err


@pytest.mark.slow
def test_the_largest_model_of_two_gpus(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "MODELS", models("Llama-2-7B", "Qwen2.5-3B", "gpt2-355m"))
    rows = []
    for gpus in (1, 2):
        assert plan("--largest", "--machine", "rtx3090", "--gpus", gpus, "--json") == 0
        rows.append({(r["weights"], r["state"]): r for r in found(capsys)["rows"]})
    one, two = rows
    streamed = "host", "int8"
    assert two[streamed]["plan"]["ranks"] == 2 and two[streamed]["plan"]["fits"]
    for row in one:  # the host is the same, and its bytes are shared out
        assert two[row]["model"] == one[row]["model"] != ""
    assert plan("--largest", "--machine", "rtx3090", "--gpus", 2) == 0
    assert "2 GPUs: device of each" in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch_whose_sums_do_not_fit_is_told_which_does(capsys: Captured) -> None:
    """Microbatches are summed in fp32 on the host; a step of one microbatch has no sums."""
    arguments = ["llama_1b", "--machine", "rtx4090", "--host-memory", "64GiB", "--set",
                 "model.size=llama-8b", "data.seq_len=1024", "train.micro_batch=1",
                 "train.global_batch_tokens=65536"]  # fmt: skip
    assert plan(*arguments) == 4
    out = capsys.readouterr().out
    assert "fewer tokens" in out and "29.9 GiB" in out
    changes = [line.split(" tokens/s  ")[1] for line in out.splitlines() if " tokens/s  " in line]
    assert changes
    for text in changes:
        keys = dict(one.split("=") for one in text.split())
        batch = int(keys["train.global_batch_tokens"])
        assert batch == 1024 * int(keys.get("train.micro_batch", 1)) < 65536
        assert plan(*arguments, *text.split()) == 0
        keys |= {"train.global_batch_tokens": f"{2 * batch}", "train.micro_batch": "1"}
        assert plan(*arguments, *(f"{key}={value}" for key, value in keys.items())) == 4


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_plot(tmp_path: Path, capsys: Captured, ending: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"sweep.{ending}"
    assert plan("demo", "--machine", "dgx2", "--sweep", "gpus=1,2", "--plot", file, *SMALL) == 0
    assert file.stat().st_size > 5000
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "give a job file"),
        (["absent"], 2, "no such file"),
        (["demo", "--machine", "h1000"], 2, "did you mean h100"),
        (["demo", "--machine", "no/such.toml"], 2, "cannot be read"),
        (["demo", "--gpus", "0"], 2, "at least 1"),
        (["demo", "--host-memory", "0"], 2, "give a size with its unit, such as 24GiB"),
        (["demo", "--host-memory", "64"], 2, "give a size with its unit, such as 24GiB"),
        (["demo", "--search", "--sweep", "gpus=1"], 2, "--search tries the divisions of one job"),
        (["--search", "--hf", "."], 2, "--search tries the divisions of one job"),
        (["demo", "--host-memory", "much"], 2, "not a size"),
        (["demo", "--machine", "cpu2", "--gpu-memory", "8GiB"], 2, "has no GPU"),
        (["demo", "--set", "model.d_model=7"], 2, "must be a multiple"),
        (["demo", "--machine", "h100", "--gpus", "7"], 2, "cannot share"),
        (["demo", "--sweep", "gpus=0"], 2, "gpus=1,2,4"),
        (["demo", "--sweep", "ranks=2"], 2, "gpus=1,2,4"),
        (["demo", "--sweep", "gpus=1", "--plot", "x.gif"], 2, ".svg or .png"),
        (["demo", "--largest"], 2, "leave out demo"),
        (["--largest", "--sweep", "gpus=1"], 2, "leave out"),
        (["demo", "--plot", "x.svg"], 2, "needs a --sweep"),
        (["gpt_13b_v100", "--machine", "cpu2"], 4, "computes on its CPU"),
    ],
)
def test_one_clear_line(capsys: Captured, arguments: list[str], code: int, said: str) -> None:
    assert plan(*arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_model_of_transformers_by_its_folder(tmp_path: Path, capsys: Captured) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128)
    config = transformers.LlamaConfig(vocab_size=512, **sizes)
    config.save_pretrained(tmp_path)
    small = ["--set", "data.seq_len=64", "train.global_batch_tokens=256"]
    for name in (tmp_path, tmp_path / "config.json"):
        assert plan("--hf", name, "--machine", "rtx4090", "--json", *small) == 0
        out, err = capsys.readouterr()
        told = json.loads(out)
        assert err == "" and told["fits"] and told["batch_tokens"] == 256
        model = transformers.LlamaForCausalLM(config)
        assert told["params"] == sum(param.numel() for param in model.parameters())
        assert told["device_bytes"]["activations"] > 0
    assert plan("--hf", tmp_path, "--machine", "rtx4090", *small) == 0
    assert "one microbatch was traced" in capsys.readouterr().out


def test_a_job_or_a_folder(tmp_path: Path, capsys: Captured) -> None:
    assert plan("demo", "--hf", tmp_path) == 2
    assert "not both" in capsys.readouterr().err
    assert plan() == 2
    assert "or --hf FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_the_question_that_people_ask(capsys: Captured) -> None:
    asked = ["--fine-tune", "1.3B", "--machine", "rtx4090", "--gpu", "12GiB", "--host"]
    assert plan(*asked, "32GiB") == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Yes: 1.3B (llama-1.3b") and second.startswith("It fits: GPU ")
    assert plan(*asked, "32GiB", "--json") == 0
    told = found(capsys)
    assert told["fits"] and told["batch_tokens"] == 32768
    rates = [told["step"]["tokens_per_s"], *(one["tokens_per_s"] for one in told["changes"])]
    assert max(rates) <= rates[0] / (1 - suggest.SAME)
    assert plan(*asked, "12GiB") == 4
    assert capsys.readouterr().out.startswith("No: 1.3B (llama-1.3b")


def test_an_encoder_with_a_decoder_is_no_causal_language_model(
    tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip("transformers")
    sizes = {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 128, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", **sizes}))
    assert plan("--hf", tmp_path, "--machine", "rtx4090") == 2
    said = capsys.readouterr().err
    assert "no causal language model of type t5" in said and "ot.plan_model" in said


def test_the_search_prints_divisions_and_the_keys_of_the_fastest(capsys: Captured) -> None:
    asked = ("debug", "--machine", "rtx4090", "--gpus", "2", "--search")
    small = ("--set", "device.kind=auto", "model.tie_embeddings=false", "model.num_layers=4")
    assert plan(*asked, *small) == 0
    out = capsys.readouterr().out
    assert "2bw (PipeDream-2BW)" in out and "The fastest job: --set ranks.pipeline=" in out
    assert plan(*asked, *small, "--json") == 0
    rows = found(capsys)["rows"]
    assert {row["stages"] for row in rows} == {1, 2}
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert plan(*asked, "--set", "device.kind=auto", "model.tie_embeddings=true") == 0
    assert "Replicas only: ranks.pipeline = 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("8B", "llama-8b"), ("350m", "gpt2-355m"), ("GPT2-1.5B", "gpt2-1.5b")]
)
def test_a_number_of_parameters_names_a_size(text: str, size: str) -> None:
    assert question.sized(text) == size


@pytest.mark.parametrize("text", ["0B", "8", "eight", "900B"])
def test_a_size_that_nobody_trains(text: str, capsys: Captured) -> None:
    assert plan("--fine-tune", text, "--machine", "rtx4090") == 2
    assert f"--fine-tune {text}" in capsys.readouterr().err
