"""The plan of a rank holds what the rank books, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from offloadtrain.config.batch_split import shared
from offloadtrain.config.job import Config
from offloadtrain.hardware.machine import find
from offloadtrain.model.transformer import Transformer
from offloadtrain.plan.plan import make
from offloadtrain.train.build import offload_job
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
    whole = planned(replace(config, offload=config.offload.replace(keep_whole=("*",))), 4)
    on_device = [sum(one["device"].values()) for one in (found, whole)]
    assert on_device[1] - on_device[0] > (0.9 if working == "host" else 0.4) * 2 * table


def moved(config: Config) -> tuple[int, int, int]:
    """Bytes of a step of many: down, up, to other ranks."""
    torch.manual_seed(0)
    model = Transformer(config.model)
    optimizer = offload_job(model, config, torch.device("cpu"))
    size = (config.train.micro_batch, config.data.seq_len)
    for _ in range(3):
        for _ in range(config.train.grad_accum_steps):
            tokens = torch.randint(config.model.vocab_size, size)
            optimizer.backward(model(tokens, tokens))
        optimizer.step()
    report = optimizer.last_step
    optimizer.close()
    assert report is not None
    return report.d2h_bytes, report.h2d_bytes, report.comm_bytes


@pytest.mark.slow
@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("accum", [1, 2])
def test_what_moves_of_tables(ranks: Run, working: str, tied: bool, accum: int) -> None:
    """A tied embedding is loaded a second time, for the head, where positions share its slot."""
    shape = GPT | {"tie_embeddings": tied, "max_seq_len": 32}
    config = job(
        shape,
        offload__zero_stage=3,
        offload__working=working,
        train__grad_accum_steps=accum,
        train__micro_batch=4,
    )
    found = make(config, "job", find("cpu2")[1], 4).prediction
    planned_bytes = (found.d2h_bytes, found.h2d_bytes, found.comm_bytes)
    assert ranks(4, moved, shared(config, 4)) == [planned_bytes] * 4
