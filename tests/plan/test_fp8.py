"""Plans of jobs whose products are in FP8."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from offloadtrain.cli.doctor.measure import fp8_flops
from offloadtrain.config import job as jobs
from offloadtrain.config.model_shape import SIZES
from offloadtrain.hardware.machine import Machine, find, shipped
from offloadtrain.hardware.peak_flops import has_fp8
from offloadtrain.plan import report
from offloadtrain.plan.costs.costs import kernels_of
from offloadtrain.plan.costs.device_time import again_seconds, block_seconds
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.plan import Plan, make

H100 = find("h100")[1]
FP8 = ("offload.fp8=tensorwise", "offload.precision=bf16")
COMPILED = (*FP8, "offload.compile_blocks=true")
WITHOUT = {"dgx2", "v100_32gb", "t4", "a10g", "a100_40gb", "a100_80gb", "a6000", "rtx2080ti",
           "rtx3060", "rtx3090", "cpu2"}  # fmt: skip


def planned(*overrides: str, machine: Machine = H100) -> Plan:
    job = jobs.load("offloadtrain/cli/jobs/llama_1b.toml", ["model.size=llama-3b", *overrides])
    return make(job, "here", machine)


def layer_ms(*, fp8: bool, budget: float = 1.0) -> float:
    """A layer of llama-3b, 16 sequences of 2048 tokens, compiled, with a share recomputed."""
    shape, where = SIZES["llama-3b"], (16 * 2048, H100, "bf16")
    kernels = kernels_of(shape, compiled=True, fp8=fp8)
    alone = block_seconds(shape, 2048, *where, kernels)
    again = (1 - budget) * again_seconds(shape, 2048, *where, kernels)
    return 1e3 * (alone.forward + alone.backward + again)


def test_the_measured_layer_of_an_h100() -> None:
    """Forward and backward took 40.4 ms in bf16 and 35.0 in FP8, to which the rate is fitted; with
    a budget of 0.3 for what is saved 46.3 and 39.8, to which nothing is."""
    assert layer_ms(fp8=True) / layer_ms(fp8=False) == pytest.approx(35.0 / 40.4, rel=0.005)
    with_budget = layer_ms(fp8=True, budget=0.3) / layer_ms(fp8=False, budget=0.3)
    assert with_budget == pytest.approx(39.8 / 46.3, rel=0.02)


def test_a_job_in_fp8_is_faster_where_its_casts_are_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, compiled = (planned(*FP8[1:], *more) for more in ((), COMPILED[2:]))
    eager, fp8 = planned(*FP8), planned(*COMPILED)
    assert fp8.prediction.busy_s["compute"] < 0.93 * compiled.prediction.busy_s["compute"]
    assert eager.prediction == plain.prediction
    assert fp8.host == compiled.host
    less_bytes = sum(compiled.device.values()) - sum(fp8.device.values())
    assert (less_bytes > 0) == (find_spec("torchao") is not None)
    assert "FP8 products: 1016 Tflop/s" in report.text(fp8)
    assert "FP8 products: timed as those of bf16" in report.text(eager)
    assert ("torchao" in report.text(fp8)) == (find_spec("torchao") is None)
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert "what layers keep is planned as of bf16: torchao is not" in report.text(fp8)
    assert "FP8" not in report.text(compiled)


def test_experts_stay_in_16_bits() -> None:
    """Of a layer with experts only attention's products are faster."""
    dense = SIZES["llama-3b"]
    gains = []
    for shape in (dense, replace(dense, num_experts=64)):
        bf16, fp8 = (
            block_seconds(shape, 2048, 8192, H100, "bf16", kernels_of(shape, compiled=True, fp8=on))
            for on in (False, True)
        )
        gains.append(bf16.forward - fp8.forward)
    assert 0 < gains[1] < 0.5 * gains[0]


@pytest.mark.parametrize("name", shipped())
def test_machines_without_fp8_refuse_by_name(name: str) -> None:
    _, machine = find(name)
    if name in WITHOUT - {"cpu2"}:
        with pytest.raises(PlanError, match=f"{machine.gpu} has no FP8 products.*8.9"):
            planned(*FP8, machine=machine)
        return
    assert (machine.fp8_tflops > machine.bf16_tflops) == (name not in WITHOUT)


def test_an_older_machine_file_of_a_card_with_fp8_is_timed_as_bf16() -> None:
    older = replace(H100, fp8_tflops=0.0)
    text = report.text(planned(*COMPILED, machine=older))
    assert "FP8 products: timed as those of bf16" in text and "fp8_tflops" in text
    assert (
        planned(*COMPILED, machine=older).prediction.seconds > planned(*COMPILED).prediction.seconds
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA L4", True), ("NVIDIA L40S", True), ("NVIDIA H100 PCIe", True),
        ("NVIDIA GH200 480GB", True), ("NVIDIA B200", True), ("NVIDIA GeForce RTX 4070 Ti", True),
        ("NVIDIA GeForce RTX 5080", True), ("NVIDIA RTX 6000 Ada Generation", True),
        ("NVIDIA RTX PRO 6000 Blackwell", True), ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA RTX A6000", False), ("NVIDIA GeForce RTX 3090", False), ("Tesla T4", False),
        ("NVIDIA A40", False), ("Quadro RTX 8000", False), ("NVIDIA GeForce RTX 2080 Ti", False),
    ],
)  # fmt: skip
def test_names_of_cards_with_fp8(name: str, known: bool) -> None:
    assert has_fp8(name) == known


def test_the_rate_is_measured_by_products_that_torch_has() -> None:
    assert fp8_flops(torch.device("cpu"), 128, 0.0) > 0
