"""The time, the writes and the price of a run; what is said of a host that is nearly full, and of a
drive where nothing fits without."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.data.prepare import prepare
from offloadtrain.data.tokens import TokenFile
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.report import text
from offloadtrain.plan.run_cost import JOB_ERRORS, Accuracy, parse_price, run_cost, steps_for
from offloadtrain.plan.search.suggest import nearest
from offloadtrain.train.build import epoch_tokens

JOB = """
name = "small"
[model]
size = "gpt2-124m"
[data]
train = "data/train.bin"
seq_len = 512
[offload]
precision = "bf16"
[train]
steps = 1000
micro_batch = 4
"""


def job(**train: Any) -> Config:
    config = jobs.loads(JOB, "job", (), print)
    return replace(config, train=replace(config.train, **train))


def machine(name: str = "h100", **values: Any) -> Machine:
    return replace(find(name)[1], **values)


def planned(target: Machine, **train: Any) -> Plan:
    return make(job(**train), "machine", target)


def test_the_run_by_hand() -> None:
    """Steps, what training waits for checkpoints, and all that is written; from the start and for
    the rest."""
    plan = planned(machine(disk_gbps=0.5), checkpoint_every=300)
    assert plan.save is not None and plan.save.stall_s > 0
    step_s, stall_s = plan.prediction.seconds, plan.save.stall_s
    price = parse_price("$0.35/h")
    for done, checkpoints in ((0, 4), (300, 3), (650, 2), (950, 1)):
        run = run_cost(plan, done=done, price=price)
        left = 1000 - done
        assert run.steps == left and run.tokens == left * 2048
        assert run.seconds == pytest.approx(left * step_s + checkpoints * stall_s)
        assert run.checkpoints == checkpoints
        assert run.written_bytes == checkpoints * plan.checkpoint_bytes
        assert run.money == pytest.approx(0.35 * run.seconds / 3600)
        assert f" and ${run.money:.2f} ± " in run.text
        unnamed = run_cost(plan, done=done, price=parse_price("0.35/h")).text
        assert f", cost {run.money:.2f} (0.35 per hour) ± " in unnamed
        assert f"{left} steps" in run.text and f"{checkpoints} checkpoint" in run.text
    more = run_cost(plan, tokens=10**10)
    assert more.steps == steps_for(plan.job, 10**10) == -(-(10**10) // 2048)
    assert run_cost(planned(machine(), checkpoint_every=0)).checkpoints == 1


def test_prices() -> None:
    for written, (amount, before) in {
        "0.35": (0.35, ""),
        "0.35/h": (0.35, ""),
        "$2/h": (2.0, "$"),
        "EUR 1.5/h": (1.5, "EUR "),
    }.items():
        price = parse_price(written)
        assert (price.per_hour, price.currency) == (amount, before)
    for wrong in ("", "cheap", "0.35/day", "-1", "1,5", "nan", "0.35/h/h"):
        with pytest.raises(jobs.ConfigError, match="give an hour's price"):
            parse_price(wrong)


def test_the_error_is_that_of_plans_like_it() -> None:
    """Of the cards that were measured, of others, and of none on a CPU; nine tenths are within."""
    known = json.loads(JOB_ERRORS.read_text())
    for name, kind in (("h200", "measured"), ("rtx4090", "published")):
        run = run_cost(planned(machine(name)))
        assert run.band is not None and f"± {100 * run.band:.0f} %" in run.text
        within = sum(abs(error) <= 100 * run.band + 1e-9 for error in known[kind])
        assert within / len(known[kind]) >= 0.9 > (within - 1) / len(known[kind])
        assert f"nine of ten of {len(known[kind])} {kind}" in run.text
    in_fp32 = replace(job(), offload=job().offload.replace(precision="fp32"))
    on_cpu = run_cost(make(in_fp32, "cpu2", machine("cpu2")))
    assert on_cpu.band is None and "±" not in on_cpu.text
    assert "error of plans is unknown" in on_cpu.text
    assert Accuracy.of([0.1, -0.2, 0.05]) == Accuracy(3, 0.1, -0.2, 0.2)


def test_an_epoch_is_counted_as_the_job_sees_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token files and JSONL; windows of a stream, documents where each is padded."""
    monkeypatch.chdir(tmp_path)
    records = [json.dumps({"text": f"document {number} " * 20}) for number in range(200)]
    Path("texts.jsonl").write_text("\n".join(records))
    made = prepare("texts.jsonl", tmp_path / "out", val_fraction=0.0, tokenizer="bytes")
    count = len(TokenFile(made.train))
    windows = (count - 256) // 256  # the last one is room for the shift of an epoch
    arguments = ("demo", "--machine", "cpu2", "--json", "--set", "data.seq_len=256")
    arguments += ("train.micro_batch=2", "train.global_batch_tokens=1024", "data.val_fraction=0")
    arguments += ("train.eval_every=0",)
    for data in ("texts.jsonl", str(made.train)):
        assert main(["plan", *arguments, "--data", data, "--epochs", "3"]) == 0
        run = json.loads(capsys.readouterr().out)["run"]
        assert run["steps"] == -(-3 * windows * 256 // 1024), data
    config = job()
    padded = replace(config.data, train=str(made.train), packing="padded")
    assert epoch_tokens(replace(config, data=padded)) == 200 * 512
    assert not Path("data").exists()
    for wrong, message in (
        (("--tokens", "10B", "--epochs", "2"), "leave out --data and --epochs"),
        (("--tokens", "many"), "not a number such as 10B"),
        (("--tokens", "-1"), "not a number such as 10B"),
        (("--epochs", "-1"), "give more than 0"),
        (("--data", "absent.jsonl"), "absent.jsonl is not there"),
        (("--price", "free"), "give an hour's price"),
        (("--sweep", "gpus=1", "--price", "1"), "are for one plan"),
    ):
        assert main(["plan", "demo", "--machine", "cpu2", *wrong]) in (1, 2)
        assert message in capsys.readouterr().err


def test_a_host_that_is_nearly_full_and_what_a_desktop_needs() -> None:
    """From 95 % on a plan warns; the reserve of a desktop is not planned with."""
    needed = max(planned(machine()).host_peaks.values())
    for share, warns in ((0.94, False), (0.96, True), (0.999, True)):
        plan = planned(machine(host_memory=f"{int(needed / share)}"))
        assert plan.fits and ("Caution: " in text(plan)) == warns
        assert not warns or f"Caution: {100 * share:.1f} %" in text(plan)
    desktop = machine("rtx4090")
    assert desktop.host_reserved_bytes == 4 << 30
    plan = planned(replace(desktop, host_memory=f"{needed + (4 << 30) - 1}"))
    assert not plan.fits and "4.0 GiB reserved for a desktop's programs" in text(plan)
    assert planned(replace(desktop, host_memory=f"{needed}", host_reserved="")).fits


@pytest.mark.slow
def test_a_drive_is_planned_where_nothing_else_fits() -> None:
    """With the rates of the machine, or assumed ones, and as little on it as suffices."""
    model = jobs.loads(JOB.replace("gpt2-124m", "llama-1.3b"), "job", (), print)
    for host, keys in (("9 GiB", {"offload.state_on"}), ("1 GiB", set())):
        rates = {"disk_read_gbps": 6.0, "disk_write_gbps": 4.0} if keys else {}
        target = machine("rtx4090", host_memory=host, host_reserved="", **rates)
        (change, *_) = nearest(model, "small", target, 1)
        printed = text(make(model, "small", target), [change])
        assert change.plan.fits == bool(keys), (host, change.text)
        if keys:
            assert keys <= change.keys.keys()
            assert change.plan.prediction.disk.read_rate <= 6e9
            rate = re.search(r"disk [\d.]+ GiB +[\d.]+k? tokens/s", printed)
            assert rate and "It fits with a drive" in printed and "at 6 and 4 GB/s" in printed
        else:
            assert "Nothing that was tried fits: " in printed
