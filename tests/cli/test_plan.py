"""`offloadtrain plan`: text, JSON, exit codes, the largest model, sweeps, one line for errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plot_sweep import plot
from offloadtrain.cli.main import main
from offloadtrain.config.hf_model import PUBLISHED_MODELS
from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.config.units import format_count
from offloadtrain.hardware.machine import find
from offloadtrain.integrations.hf_job import config_of as config_of_values
from offloadtrain.integrations.hf_job import empty_model
from offloadtrain.plan.costs.costs import KERNELS, Costs
from offloadtrain.plan.costs.device_time import traced_seconds
from offloadtrain.plan.plan import make
from offloadtrain.plan.search import largest, question, suggest
from offloadtrain.plan.search.largest import MODELS
from offloadtrain.train.build import described, tracer_of
from tests.small_buffers import small_doctor

command = import_module("offloadtrain.cli.commands.plan")
Captured = pytest.CaptureFixture[str]
SMALL = ["--set", "model.size=gpt2-124m", "data.seq_len=512", "offload.precision=fp16"]


def models(*names: str) -> dict[str, ModelShape]:
    """Few, so that a search is short."""
    return {name: MODELS[name] for name in names}


def plan(*arguments: object) -> int:
    return main(["plan", *map(str, arguments)])


def printed(capsys: Captured, *arguments: object, code: int = 0) -> str:
    """Run the command and return its stdout."""
    assert plan(*arguments) == code
    return capsys.readouterr().out


def as_json(capsys: Captured, *arguments: object) -> dict[str, Any]:
    """Run the command and return the object that it prints."""
    parsed: dict[str, Any] = json.loads(printed(capsys, *arguments, "--json"))
    return parsed


def test_the_plan_in_words(capsys: Captured) -> None:
    """For the machine that the job names, and no other."""
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
    plans = []
    for machine in ([], ["--machine", "v100_32gb"], ["--machine", "dgx2"]):
        plans.append(printed(capsys, "gpt_13b_v100", *machine, "--set", "model.num_layers=2"))
    assert plans[0] == plans[1] != plans[2]


def test_the_values_as_json_add_up(capsys: Captured) -> None:
    values = as_json(capsys, "demo", "--machine", "dgx2", "--gpus", 4, *SMALL)
    assert values["ranks"] == 4 and values["hosts"] == 1 and values["zero_stage"] == 2
    assert values["host_peak_bytes"]["step"] == 4 * sum(values["host_bytes"].values())
    assert values["fits"] and values["problems"] == [] == values["changes"]
    step = values["step"]
    waited = sum(step["exposed_s"].values())
    assert step["seconds"] == pytest.approx(step["busy_s"]["compute"] + waited)
    assert "this machine" in as_json(capsys, "demo")["machine"]


def changes_in(out: str) -> list[tuple[float, str]]:
    """The proposed changes of a plan: their tokens per second in thousands, and their keys."""
    lines = [line.split(" tokens/s  ") for line in out.splitlines() if " tokens/s  " in line]
    return [(float(before.split()[-1].rstrip("k")), keys) for before, keys in lines]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_proposes_changes_that_do(capsys: Captured) -> None:
    small = [*SMALL, "model.num_layers=4", "model.vocab_size=8192"]
    arguments = ["demo", "--machine", "v100_32gb", "--gpu-memory", "1300MiB", *small]
    out = printed(capsys, *arguments, code=4)
    assert "It does not fit:" in out and "the device needs" in out
    changes = changes_in(out)
    assert changes == sorted(changes, key=lambda change: -change[0])
    assert plan(*arguments, *changes[-1][1].split()) == 0


def test_a_measured_machine_is_planned_for(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_doctor(monkeypatch)
    file = tmp_path / "mine.toml"
    done = main(["doctor", "--quick", "--save", str(file), "--folder", str(tmp_path)])
    assert done in (0, 1) and file.exists()
    capsys.readouterr()
    assert as_json(capsys, "demo", "--machine", file)["machine"] == "mine"


@pytest.mark.slow
def test_the_largest_model(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        (row["weights"], row["state"]): row
        for row in as_json(capsys, "--largest", "--machine", "v100_32gb")["rows"]
    }
    assert set(rows) == {(w, s) for w in ("device", "host") for s in ("fp32", "int8")}
    for row in rows.values():
        values = row["plan"]
        assert values["fits"] and values["params"] == row["params"]
        assert row["params"] == num_params(MODELS[row["model"]])
        assert values["batch_tokens"] in (32768, 16 * 1024)
    assert rows["device", "int8"]["params"] > rows["device", "fp32"]["params"]
    monkeypatch.setattr(largest, "MODELS", models("Qwen2.5-1.5B", "gpt2-124m"))
    values = as_json(capsys, "--largest", "--gpu-memory", "24GiB", "--host-memory", "64GiB")
    assert "no GPU" in values["machine"] or "this machine" in values["machine"]
    for row in values["rows"]:
        assert sum(row["plan"]["device_bytes"].values()) < 24 << 30


@pytest.mark.slow
def test_no_larger_model_fits_and_the_page_has_these_rows() -> None:
    """The next larger ones in every microbatch. docs/cards.md has a row of each machine; to compute
    all of them takes more than a minute."""
    machine = find("rtx4090")[1]
    rows = list(largest.largest("rtx4090", machine))
    for row in rows:
        assert row.plan is not None and row.plan.fits
        places = {f"offload.{key}": getattr(row, key) for key in ("working", "activation", "state")}
        larger = [name for name, shape in MODELS.items() if num_params(shape) > row.params]
        for name in larger[-2:]:
            job = suggest.applied(question.job_of(name, MODELS[name]), places)
            for size in (16, 8, 4, 2, 1):
                train = {"train.micro_batch": size, "train.grad_accum_steps": 16 // size}
                assert not make(suggest.applied(job, train), "rtx4090", machine).fits, (row, name)
    page = (Path(__file__).parents[2] / "docs/cards.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("| `rtx4090` |")]
    by_place = {(row.working, row.state): row for row in rows}
    places_shown = (("device", "fp32"), ("device", "int8"), ("host", "int8"))
    for place, cell in zip(places_shown, line.split("|")[4:7], strict=True):
        row = by_place[place]
        assert row.plan is not None
        rate = format_count(row.plan.prediction.tokens_per_s)
        assert cell.strip() == f"{row.model}, {rate}"


def test_a_sweep(tmp_path: Path, capsys: Captured) -> None:
    arguments = ["demo", "--machine", "dgx2", "--sweep", "gpus=4,1,16,32", *SMALL]
    points = as_json(capsys, *arguments)["points"]
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
    assert len(printed(capsys, *arguments).splitlines()) == 2 + 7 * 4 + 3 * 2
    points = as_json(capsys, "demo", "--machine", "rtx4090", "--sweep", "gpus=1,4", *SMALL[:3])[
        "points"
    ]
    problems = {p["gpus"]: p["problem"] for p in points if p["system"] == "offloadtrain"}
    assert problems[1] == "" and "one host" in problems[4]
    pytest.importorskip("matplotlib")
    planned = as_json(capsys, "demo", "--machine", "dgx2", "--sweep", "gpus=1,2", *SMALL)
    for ending in ("svg", "png"):
        file = tmp_path / f"sweep.{ending}"
        plot(planned, str(file))
        assert file.stat().st_size > 5000


@pytest.mark.slow
def test_a_batch_whose_sums_do_not_fit_is_replaced_by_the_largest_that_does(
    capsys: Captured,
) -> None:
    """Microbatches are summed in fp32 on the host; a step of one microbatch has no sums."""
    arguments = ["llama_1b", "--machine", "rtx4090", "--host-memory", "64GiB", "--set",
                 "model.size=llama-8b", "data.seq_len=1024", "train.micro_batch=1",
                 "train.global_batch_tokens=65536"]  # fmt: skip
    out = printed(capsys, *arguments, code=4)
    assert "fewer tokens" in out and "29.9 GiB" in out
    assert changes_in(out)
    for _, text in changes_in(out):
        keys = dict(change.split("=") for change in text.split())
        batch = int(keys["train.global_batch_tokens"])
        assert batch == 1024 * int(keys.get("train.micro_batch", 1)) < 65536
        assert plan(*arguments, *text.split()) == 0
        keys |= {"train.global_batch_tokens": f"{2 * batch}", "train.micro_batch": "1"}
        assert plan(*arguments, *(f"{key}={value}" for key, value in keys.items())) == 4


WRONG_USE: list[tuple[list[str], int, str]] = [
    ([], 2, "give a job file"),
    (["absent"], 2, "no such file"),
    (["demo", "--machine", "h1000"], 2, "did you mean h100"),
    (["demo", "--machine", "no/such.toml"], 2, "cannot be read"),
    (["demo", "--gpus", "0"], 2, "at least 1"),
    (["demo", "--gpus", "1.5"], 2, "--gpus 1.5: give a number of at least 1"),
    (["demo", "--sweep", "gpus=1", "--gpus", "2"], 2, "leave out --gpus"),
    (["demo", "--search", "--compare"], 2, "--compare and --why are for one plan"),
    (["--largest", "--why", "--machine", "t4"], 2, "--compare and --why are for one plan"),
    (["demo", "--machine", "cpu2", "--tokens", "0"], 2, "--tokens 0: give at least 1 token"),
    (["demo", "--machine", "cpu2", "--tokens", "9" * 400], 2, "no more than any data have"),
    (["demo", "--host-memory", "64"], 2, "give a size with its unit, such as 24GiB"),
    (["demo", "--search", "--sweep", "gpus=1"], 2, "--search tries the divisions of one job"),
    (["demo", "--host-memory", "much"], 2, "not a size"),
    (["demo", "--machine", "cpu2", "--gpu-memory", "8GiB"], 2, "has no GPU"),
    (["demo", "--set", "model.d_model=7"], 2, "must be a multiple"),
    (["demo", "--machine", "h100", "--gpus", "7"], 2, "cannot share"),
    (["demo", "--sweep", "gpus=0"], 2, "--sweep gpus=0: gpus = 0: give a number of at least 1"),
    (["demo", "--largest"], 2, "leave out demo"),
    (["gpt_13b_v100", "--machine", "cpu2"], 4, "computes on its CPU"),
    (["demo", "--hf", "."], 2, "leave out demo"),
    (["--hf", ".", "--sweep", "gpus=1"], 2, "leave out --sweep"),
    (["demo", "--machine", "h100", "t4"], 2, "several are for --hf"),
    (["--fine-tune", "8B", "--machine", "h100", "t4", "--save", "x"], 2, "--save x: it is for one"),
    (["--fine-tune", "0B", "--price", "free"], 2, "--price free: give an hour's price"),
    (["--fine-tune", "0B", "--machine", "rtx4090"], 2, "--fine-tune 0B"),
    (["--fine-tune", "8", "--machine", "rtx4090"], 2, "--fine-tune 8"),
    (["--fine-tune", "900B", "--machine", "rtx4090"], 2, "--fine-tune 900B"),
]


def test_wrong_use_is_reported_in_one_line(capsys: Captured) -> None:
    for arguments, code, message in WRONG_USE:
        assert plan(*arguments) == code, arguments
        out, err = capsys.readouterr()
        assert out == "" and message in err and len(err.splitlines()) == 1, arguments


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
        values = json.loads(out)
        assert err == "" and values["fits"] and values["batch_tokens"] == 256
        model = transformers.LlamaForCausalLM(config)
        assert values["params"] == sum(param.numel() for param in model.parameters())
        assert values["device_bytes"]["activations"] > 0
    assert "one microbatch was traced" in printed(
        capsys, "--hf", tmp_path, "--machine", "rtx4090", *small
    )
    sizes = {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 128, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", **sizes}))
    assert plan("--hf", tmp_path, "--machine", "rtx4090") == 2
    err = capsys.readouterr().err
    assert "no causal language model of type t5" in err and "ot.plan_model" in err


@pytest.mark.slow
def test_the_question_whether_a_model_can_be_fine_tuned(capsys: Captured) -> None:
    sizes = {"8B": "llama-8b", "350m": "gpt2-355m", "GPT2-1.5B": "gpt2-1.5b"}
    assert {text: question.sized(text) for text in sizes} == sizes
    arguments = ["--fine-tune", "1.3B", "--machine", "rtx4090", "--gpu", "12GiB", "--host"]
    first, second, *_ = printed(capsys, *arguments, "32GiB").splitlines()
    assert first.startswith("Yes, with offload.working=") and "1.3B (llama-1.3b)" in first
    assert second.startswith("It fits: GPU ")
    values = as_json(capsys, *arguments, "32GiB")
    assert values["fits"] and values["batch_tokens"] == 32768
    rates = [change["tokens_per_s"] for change in values["changes"]]
    assert max(rates, default=0) <= values["step"]["tokens_per_s"] / (1 - suggest.SAME)
    assert printed(capsys, *arguments, "12GiB", code=4).startswith("No: 1.3B (llama-1.3b)")
    kept = as_json(capsys, *arguments, "32GiB", "--set", "offload.state=int8")
    assert "offload.state=int8" in kept["answer"] and kept["fits"]


def config_of(folder: Path, kind: str, **values: Any) -> Path:
    """A folder with the config.json of a small model, wide enough for a GPU to be short of room."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=1024, num_hidden_layers=4, intermediate_size=2048, vocab_size=32000)
    heads = dict(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=1024)
    transformers.AutoConfig.for_model(kind, **sizes | heads | values).save_pretrained(folder)
    return folder


AT_4090 = ("--machine", "rtx4090")
SMALL_HF = ("--set", "data.seq_len=128", "train.global_batch_tokens=2048")


@pytest.mark.slow
def test_an_answer_is_the_fastest_of_all_that_fits(tmp_path: Path) -> None:
    """Against the plan of every combination of the keys that a search may change."""
    folder = config_of(tmp_path, "llama")
    sizes = {"gpu_memory": "3 GiB", "host_memory": "5 GiB", "host_reserved": ""}
    machine = replace(find("rtx4090")[1], **sizes)
    asked = question.asked("llama", "hf", str(folder), SMALL_HF[1:], 1, print)
    config = described(asked.job)
    trace = tracer_of(config, machine, 1)
    answer = question.answer(replace(asked, job=config), "small", machine, 1, trace)
    assert answer.fits and answer.best.fits
    fastest = 0.0
    for keys in suggest.combinations(config, 1, suggest.ALL):
        size = keys.get("train.micro_batch", 16)
        job = suggest.applied(config, keys | {"train.grad_accum_steps": 16 // size})
        planned = make(job, "small", machine, 1, trace)
        if planned.fits and not any(job.offload.problems()):
            fastest = max(fastest, planned.prediction.tokens_per_s)
    assert answer.best.prediction.tokens_per_s >= fastest * (1 - suggest.SAME)


@pytest.mark.slow
def test_an_answer_ends_with_its_job(tmp_path: Path, capsys: Captured) -> None:
    """Which is planned like the answer: where the model fits, where it does with other values than
    those asked for, and not where nothing fits."""
    folder = config_of(tmp_path / "llama", "llama")
    for host, keys, first in (
        ("64GiB", (), "Yes, with offload.working="),
        ("4GiB", ("offload.state=fp32",), "No: llama (107M parameters) does not fit on rtx4090"),
        ("3GiB", (), "No: llama (107M parameters) does not fit on rtx4090"),
    ):
        file = tmp_path / f"{host}.toml"
        where = ("--machine", "rtx4090", "--host", host, "--host-reserve", "0")
        arguments = ("--hf", folder, *where, *SMALL_HF, *keys, "--save", file)
        if host == "3GiB":
            assert plan(*arguments) == 2 and not file.exists()
            error = capsys.readouterr().err
            assert "there is no job to save" in error and "nothing fits; " in error
            continue
        code = 0 if first.startswith("Yes") else 4
        out = printed(capsys, *arguments, code=code)
        line, text = out.splitlines()[0], file.read_text()
        assert line.startswith(first) and out.endswith(text) and text.startswith(f"# {line}\n")
        saved = as_json(capsys, file, *where)
        assert plan(*arguments) == 2
        again = capsys.readouterr()
        assert again.out == out and "File exists" in again.err
        assert saved["fits"] and f": {format_count(saved['step']['tokens_per_s'])} tokens/s" in line
        assert ("the nearest that fits is offload." in line) == (code == 4)


@pytest.mark.slow
def test_what_a_model_cannot_do_is_not_tried_and_an_answer_is_printed(
    tmp_path: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """The head of Gemma caps its logits, so that its loss has no parts: said once."""
    suggest._warn_once.cache_clear()
    folder = config_of(tmp_path / "gemma", "gemma3_text", head_dim=128)
    where = ("--machine", "rtx4090", "--gpu", "2GiB", "--host", "3.1GiB", "--host-reserve", "0")
    out = printed(capsys, "--hf", folder, *where, *SMALL_HF, code=4)
    assert out.startswith("No: gemma (") and "train.chunked_loss" not in out
    (record,) = caplog.records
    assert "not tried: the loss of Gemma3ForCausalLM cannot be computed in" in record.message


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("values", "keys"), [({}, ("model.lora={r = 4}",)), ({"tie_word_embeddings": True}, ())]
)
def test_modules_that_are_no_blocks_take_their_time(
    values: dict[str, Any], keys: tuple[str, ...], tmp_path: Path
) -> None:
    """Frozen parts, with backward through them, and a head whose weight is the embedding's."""
    folder, (name, machine) = str(config_of(tmp_path / "llama", "llama", **values)), find("rtx3060")
    job = question.asked("a", "hf", folder, keys, 1, lambda line: None).job
    config, trace = command._described(job, machine, 1)
    placed = make(config, name, machine, 1, trace).placed
    assert placed.traced is not None and len(placed.traced.blocks) > len(placed.spec.blocks)
    tokens = placed.config.train.micro_batch * placed.config.data.seq_len
    traced, computed = placed.traced.blocks.values(), Costs(placed, machine).computed.values()
    every = [traced_seconds(cost, tokens, machine, "bf16", KERNELS) for cost in traced]
    seconds = sum(block.forward + block.backward for block in computed)
    assert seconds == pytest.approx(sum(each.forward + each.backward for each in every))


def test_a_model_of_a_table_is_traced_once_for_all_gpus(tmp_path: Path) -> None:
    folder, traces = str(config_of(tmp_path / "llama", "llama")), command.Traces()
    job = question.asked("llama", "hf", folder, (), 1, lambda line: None).job
    first, second = (
        command._described(job, find(name)[1], 1, traces)[1] for name in ("rtx4090", "h100")
    )
    assert first is second is not None


@pytest.mark.slow
def test_models_and_machines_are_answered_in_a_table(tmp_path: Path, capsys: Captured) -> None:
    """As one by one; what cannot be planned has its reason, and the others are answered."""
    folder, absent = config_of(tmp_path / "llama", "llama"), tmp_path / "absent"
    machines = ("rtx4090", "t4")
    arguments = ("--hf", absent, folder, "--machine", *machines, *SMALL_HF)
    lines = printed(capsys, *arguments).splitlines()
    rows = as_json(capsys, *arguments)["rows"]
    assert len(lines) == 1 + len(rows) == 5
    places = [(Path(row["model"]).name, row["machine"]) for row in rows]
    assert places == [(name, at) for name in ("absent", "llama") for at in machines]
    for row, line in zip(rows, lines[1:], strict=True):
        if "absent" in line:
            assert ": no config.json" in line and ": no config.json" in row["problem"]
            continue
        alone = as_json(capsys, "--hf", row["model"], "--machine", row["machine"], *SMALL_HF)
        assert row["fits"] and row["answer"] == alone["answer"] and " yes " in line
        assert row["tokens_per_s"] == alone["step"]["tokens_per_s"]
        assert row["job_file"] == alone["job_file"]


@pytest.mark.slow
def test_the_table_of_the_page_is_what_the_command_prints(capsys: Captured) -> None:
    """A model of it, on all of its machines; the table is whole."""
    page = Path("docs/plan.md").read_text().partition("## Nine models on three machines")[2]
    command, *table = page.partition("```text\n")[2].partition("\n```")[0].splitlines()
    named, machines = command.partition("--hf ")[2].split(" --machine ")
    places = [row.split()[:2] for row in table[1:]]
    assert places == [[a, b] for a in named.split() for b in machines.split()]
    assert len(places) == 9 * 3
    model = named.split()[0]
    printed_rows = printed(capsys, "--hf", model, "--machine", *machines.split()).splitlines()
    assert printed_rows == [table[0], *(row for row in table if row.startswith(f"{model} "))]


@pytest.mark.slow
def test_a_quantized_model_is_planned_and_says_what_training_starts_from(
    tmp_path: Path, capsys: Captured
) -> None:
    """As the same model unquantized."""
    plain = as_json(capsys, "--hf", config_of(tmp_path / "llama", "llama"), *AT_4090, *SMALL_HF)
    for entry, parts in (
        (
            {"quant_method": "gptq", "bits": 4},
            ("(gptq, 4 bits)", "the model that it was quantized"),
        ),
        ({"quant_method": "mxfp4"}, ("(mxfp4)", "Mxfp4Config(dequantize=True)")),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("4 bits)", ".dequantize()")),
    ):
        file = config_of(tmp_path / "llama", "llama") / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": entry}))
        out = printed(capsys, "--hf", file, *AT_4090, *SMALL_HF)
        assert "starts from 16-bit weights" in out and all(part in out for part in parts), entry
        answer = out.splitlines()[0]
        assert plain["answer"] == answer


@pytest.mark.slow
def test_published_models_have_their_parameters_and_are_planned(capsys: Captured) -> None:
    """As their pages state them, to the last one."""
    pytest.importorskip("transformers")
    models = json.loads(PUBLISHED_MODELS.read_text())["models"]
    assert len(models) > 30
    for name, entry in models.items():
        model = empty_model(config_of_values(entry["config"]), None)
        assert sum(param.numel() for param in model.parameters()) == entry["params"], name
    assert plan("--fine-tune", "qwen3-0.6b", *AT_4090, "--save", "/dev/null/x", *SMALL_HF) == 2
    assert plan("--fine-tune", "qwen3-0.6b", *AT_4090, *SMALL_HF, "--tokens", "1M") == 0
    out, err = capsys.readouterr()
    assert "planned by its published sizes: hf download Qwen/Qwen3-0.6B" in err
    assert "(596M parameters)" in out and "The run: 489 steps, 1M tokens" in out
    assert 'hf = "qwen3-0.6b"' in out and "steps = 489" in out


@pytest.mark.slow
def test_the_page_has_the_stages_that_are_planned(capsys: Captured) -> None:
    page = " ".join(Path("docs/plan.md").read_text().split())
    keys = ("model.vocab_size=151936", "model.tie_embeddings=false", "offload.state_on=device")
    where = ("--machine", "a100_80gb", "--gpus", 4, "--set", *keys, "ranks.pipeline=4")
    even, chosen = (
        printed(capsys, "llama_1b", *where, *more)
        for more in ((), ("ranks.layers_per_stage=auto",))
    )
    layers = re.findall(r"stage \d \((\d) layers\)", chosen)
    seconds = [re.findall(r"step: (\d\.\d+ s)", out)[0] for out in (even, chosen)]
    assert f"{seconds[0]} a step with 6 layers on each stage" in page
    assert f"{seconds[1]} with {', '.join(layers[:-1])} and {layers[-1]}:" in page


@pytest.mark.slow
def test_a_search_tries_selective_recompute(capsys: Captured) -> None:
    """Where all activations do not fit, and it is faster than to recompute all."""
    keys = ("offload.state=int8", "offload.sums_on=host", "offload.working=device")
    asked = question.asked("1.3B", "size", "llama-1.3b", keys, 1, print)
    machine = replace(find("h100")[1], gpu_memory="16 GiB")
    answer = question.answer(asked, "h100", machine, 1, None)
    rates = {}
    for mode in ("keep", "selective", "recompute", "offload"):
        for size in (1, 2, 4, 8, 16):
            values = {"train.micro_batch": size, "train.grad_accum_steps": 16 // size}
            job = suggest.applied(asked.job, values | {"offload.activation": mode})
            planned = make(job, "h100", machine, 1)
            if planned.fits:
                rates[mode, size] = planned.prediction.tokens_per_s
    assert answer.keys["offload.activation"] == "selective"
    assert answer.best.prediction.tokens_per_s == max(rates.values()) == rates["selective", 4]


@pytest.mark.slow
def test_the_search_prints_divisions_and_the_keys_of_the_fastest(capsys: Captured) -> None:
    search = ("debug", "--machine", "rtx4090", "--gpus", "2", "--search")
    small = ("--set", "device.kind=auto", "model.tie_embeddings=false", "model.num_layers=4")
    out = printed(capsys, *search, *small)
    assert "2bw (PipeDream-2BW)" in out and "The fastest job: --set ranks.pipeline=" in out
    rows = as_json(capsys, *search, *small)["rows"]
    assert {row["stages"] for row in rows} == {1, 2}
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert plan(*search, "--set", "device.kind=auto", "model.tie_embeddings=true") == 0
    assert "Replicas only: ranks.pipeline = 2" in capsys.readouterr().err
