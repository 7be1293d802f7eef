"""Plans of published models on every shipped machine are sane: times that add up, rates below the
data sheet's, bytes that fit where they are said to."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import isfinite

import pytest

from offloadtrain.hardware.machine import find, shipped
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.largest import MODELS
from offloadtrain.plan.search.question import job_of
from offloadtrain.plan.search.suggest import applied

SMALL, LARGE = "gpt2-124m", "Llama-3.2-1B"


def planned(model: str, machine: str, working: str, state: str) -> Plan:
    """With four of its layers, which a simulation of a step has time for."""
    job = job_of(model, replace(MODELS[model], num_layers=4))
    places = {"offload.working": working, "offload.state": state, "train.micro_batch": 1}
    sequences = {"train.grad_accum_steps": job.train.micro_batch}
    policy = {"offload.activation": "recompute"}
    return make(applied(job, places | sequences | policy), machine, find(machine)[1])


@pytest.mark.slow
@pytest.mark.parametrize("machine", shipped())
def test_times_add_up_and_bytes_fit(machine: str) -> None:
    for working, state in product(("device", "host"), ("fp32", "int8")):
        small, large = (planned(model, machine, working, state) for model in (SMALL, LARGE))
        for plan in (small, large):
            prediction = plan.prediction
            assert (
                isfinite(prediction.seconds)
                and max(prediction.busy_s.values()) <= prediction.seconds * 1.0001
            )
            assert min(*prediction.busy_s.values(), *prediction.exposed_s.values()) >= 0
            computed = prediction.busy_s["compute"] + prediction.exposed
            # A step of a small model takes its launches.
            longest = max(computed, prediction.launch_s)
            assert longest == pytest.approx(prediction.seconds, rel=0.02)
            assert prediction.mfu is None or 0 < prediction.mfu < 0.9
            needed = sum(plan.device.values()), max(plan.host_peaks.values())
            room = plan.device_room, plan.host_room
            within = needed[1] <= room[1] and (plan.machine.on_cpu or needed[0] <= room[0])
            assert plan.fits == within
        # Half as long sequences take as many launches: where these bound it, it may be slower.
        is_launching = small.prediction.launch_s >= small.prediction.seconds
        assert is_launching or large.prediction.tokens_per_s < small.prediction.tokens_per_s
