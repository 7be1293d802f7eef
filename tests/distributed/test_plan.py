"""The plan of tables in shards: what a rank holds and moves, to the byte. Other plans of ranks are
in `test_divisions.py`."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("working", ["device", "host"])
def test_of_tables_in_shards(ranks: Run, working: str) -> None:
    """Untied ones, of which one is gathered at a time."""
    keys = {"offload__zero_stage": 3, "offload__working": working, "model__tie_embeddings": False}
    config = shared(job(GPT, train__micro_batch=4, **keys), 4)
    table, sharded = config.model.vocab_size * config.model.d_model, planned(config, 4)
    assert ranks(4, booked, config) == [sharded] * 4
    unsharded = planned(replace(config, offload=config.offload.replace(keep_whole=("*",))), 4)
    on_device = [sum(tiers["device"].values()) for tiers in (sharded, unsharded)]
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
@pytest.mark.parametrize(
    ("working", "tied", "accum"),
    [("device", True, 1), ("host", True, 2), ("device", False, 2), ("host", False, 1)],
)
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
    prediction = make(config, "job", find("cpu2")[1], 4).prediction
    planned_bytes = (prediction.d2h_bytes, prediction.h2d_bytes, prediction.comm_bytes)
    assert ranks(4, moved, shared(config, 4)) == [planned_bytes] * 4
