"""`plan --compare`: the peers by hand and on published cells, and the tables of the page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config.model_shape import SIZES
from offloadtrain.hardware.machine import find
from offloadtrain.plan.baselines.peers import (
    DEEPSPEED,
    FSDP2,
    FSDP2_HOST_SHARE,
    PEERS,
    TORCHAO,
    ZERO3,
    Work,
    checked,
)
from offloadtrain.plan.costs.device_time import Seconds
from offloadtrain.plan.plan import make
from offloadtrain.plan.search import compare
from tests.plan.test_plan import shipped_job

Captured = pytest.CaptureFixture[str]
PAGE = (Path(__file__).parents[2] / "docs/comparison.md").read_text()
MACHINE = replace(find("rtx4090")[1], dram_gbps=50.0, h2d_gbps=20.0, d2h_gbps=10.0)
WORK = Work(
    shape=SIZES["debug"],
    params=1_000_000_000,
    largest_block=40_000_000,
    outside=200_000_000,
    activation_bytes=5_000_000_000,
    compute=Seconds(1.0, 3.0),
)


def gib(owners: Any) -> float:
    return float(sum(owners.values()))


def test_fsdp2_by_hand() -> None:
    """4 GB up before forward and backward, 4 GB down beside backward; then 40 bytes a parameter."""
    update = 40 / 50 / FSDP2_HOST_SHARE
    assert PEERS[FSDP2].seconds(WORK, MACHINE) == pytest.approx(1.0 + 3.0 + update)
    small = replace(WORK, compute=Seconds(0.1, 0.1))
    assert PEERS[FSDP2].seconds(small, MACHINE) == pytest.approx(4 / 20 + 4 / 10 + update)
    two = replace(small, micro_steps=2)  # a wait for the copy, and its sum: 12 bytes a parameter
    more = 4 / 20 + 4 / 20 + 4 / 10 + 12 / 50
    assert PEERS[FSDP2].seconds(two, MACHINE) == pytest.approx(4 / 20 + 4 / 10 + update + more)
    assert gib(PEERS[FSDP2].host(WORK)) == 16e9
    gathered, way = 2 * (2 * 0.04 + 0.2), 2 * 0.2 + 4 * 0.2
    assert gib(PEERS[FSDP2].device(WORK)) == pytest.approx(1e9 * (gathered + 0.4 + way + 5))


def test_torchao_by_hand() -> None:
    """2 GB down beside backward; then 14 bytes a parameter on the host, beside 2 GB up."""
    assert PEERS[TORCHAO].seconds(WORK, MACHINE) == pytest.approx(4.0 + 14 / 50)
    four = replace(WORK, micro_steps=4)
    assert PEERS[TORCHAO].seconds(four, MACHINE) == pytest.approx(16.0 + 14 / 50)
    assert gib(PEERS[TORCHAO].device(WORK)) == 7e9
    assert gib(PEERS[TORCHAO].device(four)) == 9e9  # sums stay there
    assert gib(PEERS[TORCHAO].host(four)) == 8e9


def test_deepspeed_by_hand() -> None:
    """The papers' model of ZeRO-2, whose hooks no longer slow compute: the gradient pass of 12
    bytes, Adam's 28 over 0.64, 2 bytes up."""
    seconds = 4.0 + 12 / 50 + 28 / 50 / 0.64 + 2 / 20
    assert PEERS[DEEPSPEED].seconds(WORK, MACHINE) == pytest.approx(seconds)
    assert gib(PEERS[DEEPSPEED].host(replace(WORK, micro_steps=2))) == 20e9


def test_zero_3_by_hand() -> None:
    """2 GB of weights up in forward and in backward, 2 GB of gradients down; then the same host
    work, and 12 bytes a parameter for each further microbatch."""
    update = (12 + 28 / 0.64) / 50
    assert PEERS[ZERO3].seconds(WORK, MACHINE) == pytest.approx(4.0 + update)
    small = replace(WORK, compute=Seconds(0.05, 0.1))
    assert PEERS[ZERO3].seconds(small, MACHINE) == pytest.approx(2 / 20 + 2 / 10 + update)
    three = replace(small, micro_steps=3)
    more = 2 * (2 / 20 + 2 / 10 + 12 / 50)
    assert PEERS[ZERO3].seconds(three, MACHINE) == pytest.approx(2 / 20 + 2 / 10 + update + more)
    assert gib(PEERS[ZERO3].device(WORK)) == pytest.approx(2e9 * (0.08 + 0.2) + 2e9 + 5e9)


def test_the_predictors_hold_on_known_throughputs() -> None:
    """Of 2024 to 2026: six of DeepSpeed on an RTX 4090, and those measured on an H100 and H200."""
    for peer, cells, worst in ((DEEPSPEED, 4, 0.12), (ZERO3, 5, 0.15), (FSDP2, 1, 0.03)):
        accuracy = compare.accuracy(peer)
        assert accuracy.cells == cells == len(checked(peer)) and abs(accuracy.worst) <= worst
        errors = f"{100 * accuracy.median:.0f} % | {100 * accuracy.worst:+.0f} %"
        assert f"| {peer} | {cells} | {errors} |" in PAGE
    torchao = compare.accuracy(TORCHAO)
    assert torchao.cells == 4 and torchao.median <= 0.1 and abs(torchao.worst) <= 0.12


@pytest.mark.slow
def test_a_row_is_a_lower_bound_where_nothing_of_the_card_is_known() -> None:
    assert {cell.gpu for cell in checked(ZERO3)} == {"NVIDIA GeForce RTX 4090"}
    assert {"NVIDIA H200", find("h100")[1].gpu} < {cell.gpu for cell in checked(DEEPSPEED)}
    plan = make(shipped_job("llama_1b"), "rtx4090", find("rtx4090")[1])
    bounds = {row.system: row.lower_bound for row in compare.compare(plan)}
    assert bounds == {
        compare.OURS: False,
        DEEPSPEED: False,
        ZERO3: False,
        FSDP2: True,
        TORCHAO: True,
    }
    printed = compare.table(compare.compare(plan), plan)
    lines = {line[:24].strip(): line for line in printed.splitlines()}
    assert "≥ " in lines[FSDP2] and "≥ " not in lines[DEEPSPEED]
    assert "+2 % of 1" in lines[FSDP2] and "a lower bound, nothing was calibrated" in printed


@pytest.mark.slow
def test_rows_are_of_the_same_step(capsys: Captured) -> None:
    """A smaller card: smaller microbatches, never other tokens; what cannot be is said."""
    arguments = ["plan", "llama_1b", "--machine", "rtx4090", "--compare", "--json"]
    assert main([*arguments, "--gpu", "10GiB", "--set", "train.micro_batch=4"]) in (0, 4)
    ours, *peers = json.loads(capsys.readouterr().out)["compare"]
    assert ours["system"] == compare.OURS and [row["system"] for row in peers] == list(PEERS)
    for row in (ours, *peers):
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(262_144)
        assert row["fits"] == (not row["problem"])
    assert any(row["fits"] and row["micro_batch"] < 4 for row in peers)
    assert main([*arguments, "--gpus", "2"]) == 0
    torchao = json.loads(capsys.readouterr().out)["compare"][-1]
    assert torchao["problem"] == "it trains on 1 GPU."


@pytest.mark.parametrize(
    "override", ["--machine cpu2", "--machine rtx4090 --set optim.name=lion", "--sweep gpus=1,2"]
)
def test_what_cannot_be_compared_is_refused(override: str, capsys: Captured) -> None:
    assert main(["plan", "llama_1b", "--compare", *override.split()]) == 2
    message = capsys.readouterr().err
    assert "--compare is for" in message or "--compare and --why are for one plan" in message


@pytest.mark.slow
def test_the_tables_of_the_page_are_what_is_printed(capsys: Captured) -> None:
    command = r"    (offloadtrain plan [^\n]*--compare)"
    shown = re.findall(rf"{command}\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 2
    for command, table in shown:
        assert main(command.split()[1:]) == 0
        assert table in capsys.readouterr().out, command
