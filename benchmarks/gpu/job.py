"""A job of 100 steps with its run folder: `python -m benchmarks.gpu.job [--toy] FOLDER`."""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.gpu.systems import MissingError
from offloadtrain.events import log_lines, schema

STEPS = 100
JOB = ["gpt2_124m", "data.source=python-stdlib", "train.global_batch_tokens=8192"]
TOY = ["demo", "model.num_layers=1", "model.d_model=32", "model.num_heads=2", "data.seq_len=32"]


def train(folder: Path, *, toy: bool) -> dict[str, Any]:
    """What the run's log says: the first and last loss, tokens per second, checkpoints.

    Raises:
        MissingError: a package of the command line is not installed.
        RuntimeError: the run ended with another code than 0.
    """
    try:
        from offloadtrain.cli.main import main
    except ModuleNotFoundError as missing:
        raise MissingError(f"{missing.name} is not installed") from missing
    steps = 4 if toy else STEPS
    job, *keys = TOY if toy else JOB
    keys += [f"train.steps={steps}", f"train.checkpoint_every={steps // 2}", "train.eval_every=0"]
    with redirect_stdout(sys.stderr):
        status = main(["train", job, "--run-dir", str(folder), "--set", *keys])
    if status:
        raise RuntimeError(f"offloadtrain train {job} ended with {status}")
    events = [record.event for record in log_lines.read(folder / "events" / "rank000.jsonl")]
    steps_made = [event for event in events if isinstance(event, schema.Step)]
    rate = statistics.median(
        event.tokens / event.step_ms * 1e3 for event in steps_made[steps // 2 :]
    )
    first, last = steps_made[0].loss, steps_made[-1].loss
    return {
        "summary": f"{len(steps_made)} steps, loss {first:.3f} to {last:.3f}, {rate:.0f} tokens/s",
        "losses": [event.loss for event in steps_made],
        "tokens_per_s": rate,
        "checkpoints": len(list((folder / "checkpoints").glob("step*"))),
    }


if __name__ == "__main__":
    try:
        result = train(Path(sys.argv[-1]), toy="--toy" in sys.argv)
    except MissingError as missing:
        result = {"missing": str(missing)}
    print(json.dumps(result))
