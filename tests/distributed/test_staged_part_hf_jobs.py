"""Jobs with `model.hf` and `ranks.tensor` beside `ranks.pipeline`: the bits of the same parts
without stages, checkpoints of any division."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from offloadtrain.train import dry_run
from offloadtrain.train.build import described
from tests.distributed.conftest import Run
from tests.distributed.staged_job import UNFLUSHED, assert_same_as_alone
from tests.distributed.test_jobs import data  # noqa: F401
from tests.distributed.test_pipeline_hf_jobs import STAGES, hf_job, saved, trained_hf
from tests.distributed.test_tensor_hf_jobs import BF16, FP32, PARTITIONED, PARTS, carried_hf
from tests.distributed.test_tensor_jobs import assert_same_state

pytest.importorskip("transformers")

BOTH = STAGES | PARTS | FP32


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"train.chunked_loss": "true", "data.packing": '"isolated"'}),
        ("Qwen3", BF16 | {"offload.activation": '"recompute"'} | PARTITIONED),
        pytest.param("Gemma2", {"model.init": '"random"'}, marks=pytest.mark.long),
        pytest.param("Qwen2", UNFLUSHED | {"train.eval_every": 4}, marks=pytest.mark.long),
    ],
)
def test_a_job_in_stages_has_the_bits_of_one_without(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    kind: str,
    changes: dict[str, Any],
) -> None:
    """And each stage is proved."""
    saved(data, kind)
    chosen = BOTH | changes
    assert_same_as_alone(ranks, tmp_path, data, chosen, partial(trained_hf, kind=kind))
    job = described(hf_job(data, kind, **chosen))
    for stage in (0, 1):
        assert "as planned" in dry_run.check(make(job, *find("cpu2"), 4, stage=stage))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "then"),
    [("Llama", (1, {})), pytest.param("Qwen3", (2, STAGES), marks=pytest.mark.long)],
)
def test_a_checkpoint_is_the_same_in_every_division(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    kind: str,
    then: tuple[int, dict[str, Any]],
) -> None:
    """2 stages of 2 parts → others: masters and moments to the bit, and back; the same export."""
    saved(data, kind)
    size, divided = then
    chosen = FP32 | {"train.steps": 3, "train.eval_every": 0}
    run, other, back = (tmp_path / name for name in ("run", "carried", "back"))
    ranks(4, trained_hf, run, data, kind, **chosen | BOTH)
    ranks(size, carried_hf, run, other, data, kind, **chosen | divided)
    assert_same_state(run, other)
    ranks(4, carried_hf, other, back, data, kind, **chosen | BOTH)
    assert_same_state(run, back)
    exported = []
    for folder in (run, other):
        (path,) = (folder / "checkpoints").iterdir()
        assert main(["export", f"{path}", f"{folder}-out", "--dtype", "fp32"]) == 0
        exported.append(Path(f"{folder}-out/model.safetensors").read_bytes())
    assert exported[0] == exported[1]
