"""The plan of a rank holds what the rank books, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadtrain.config.batch_split import shared
from tests.distributed.conftest import Run
from tests.plan.test_memory import GPT, booked, job, planned


@pytest.mark.parametrize(
    "keys",
    [
        {"offload__zero_stage": 1},
        {"offload__zero_stage": 2, "offload__reduction": "fp32"},
        {"offload__zero_stage": 3},
        {"offload__zero_stage": 3, "offload__state_on": "device"},
        {"offload__working": "host", "offload__state": "int8"},
        {"offload__zero_stage": 1, "offload__reduction": "fp32", "train__grad_accum_steps": 2},
    ],
)
def test_of_a_rank(ranks: Run, keys: dict[str, Any]) -> None:
    config = shared(job(GPT, train__micro_batch=4, **keys), 2)
    assert ranks(2, booked, config) == [planned(config, 2)] * 2


@pytest.mark.parametrize("working", ["device", "host"])
def test_of_tables_in_shards(ranks: Run, working: str) -> None:
    """Untied ones, of which one is gathered at a time."""
    keys = {"offload__zero_stage": 3, "offload__working": working, "model__tie_embeddings": False}
    config = shared(job(GPT, train__micro_batch=4, **keys), 4)
    table, found = config.model.vocab_size * config.model.d_model, planned(config, 4)
    assert ranks(4, booked, config) == [found] * 4
    whole = planned(replace(config, offload=replace(config.offload, keep_whole=("*",))), 4)
    on_device = [sum(one["device"].values()) for one in (found, whole)]
    assert on_device[1] - on_device[0] > (0.9 if working == "host" else 0.4) * 2 * table
