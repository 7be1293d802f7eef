"""Train small jobs on a pool of ranks, and compare their run folders."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.events import log_lines, schema
from offloadtrain.events.control import Requests
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train.build import assemble, described
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import Entry
from offloadtrain.train.checkpoint.restore import read_whole, restore
from offloadtrain.train.checkpoint.save import save
from offloadtrain.train.log.console import Console
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.run_folder import open_run
from offloadtrain.train.signals import StopRequests
from offloadtrain.train.trained_model import language_model, open_saved
from offloadtrain.train.trainer import trainer_of
from tests.train.small_job import JOB, AnyEvent, write_text

Options = dict[str, Any]
"""Keys of a job with their values as TOML. `hf` is the kind of a model of transformers, and
`hf.KEY` a value of its configuration."""

FP32: Options = {"offload.precision": '"fp32"'}
BF16: Options = {"offload.precision": '"bf16"'}
FP16: Options = {"offload.precision": '"fp16"'}
CONSTANT: Options = {"optim.schedule": '"constant"'}
"""The learning rate does not depend on the number of steps, so a stopped run can go on."""
ANY_DEVICE: Options = {"device.kind": '"auto"'}

HF_SIZES: Options = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
HF_ROWS: Options = {"train.micro_batch": 2, "train.grad_accum_steps": 4, "log.to": '["jsonl"]'}


@dataclass(frozen=True, slots=True)
class RankRun:
    """What the log of one rank says about its run.

    Attributes:
        planned, allocated: (tier, owner) → bytes.
        parts: the plan's names for the rank's stage and its part of the matrices.
    """

    status: str
    losses: dict[int, float]
    val_loss: float | None
    tokens: int
    comm_bytes: int
    d2h_bytes: list[int]
    ranks_ms: tuple[float, ...]
    busy_ms: dict[str, float]
    planned: dict[tuple[str, str], int]
    allocated: dict[tuple[str, str], int]
    parts: dict[str, str]


def job_of(folder: Path, **options: Any) -> Config:
    """Make the small job. Its data and its model of transformers, if any, are in `folder`."""
    model = {key: value for key, value in options.items() if re.match(r"hf\b", key)}
    changes = {key: value for key, value in options.items() if key not in model}
    if not model:
        return jobs.loads(JOB.format(folder=folder), "small", _overrides(changes))
    values = {key.removeprefix("hf."): value for key, value in model.items() if key != "hf"}
    path = save_hf_model(folder, model["hf"], **values)
    head, _, rest = JOB.format(folder=folder).partition("[model]")
    text = f'{head}[model]\nhf = "{path}"\n[data]{rest.partition("[data]")[2]}'
    return described(jobs.loads(text, "small", _overrides(HF_ROWS | changes)))


def _overrides(options: Options) -> list[str]:
    return [f"{key}={value}" for key, value in options.items()]


def save_hf_model(folder: Path, kind: str, **values: Any) -> Path:
    """Save a small model as transformers does, once."""
    import transformers

    path = folder / "-".join((kind.lower(), *(f"{key}={values[key]}" for key in sorted(values))))
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**HF_SIZES | values)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def write_job(folder: Path, **options: Any) -> Path:
    """Write a job of nine steps with its text."""
    write_text(folder)
    steps = {"train.steps": 9, "train.checkpoint_every": 4}
    path = folder / "job.toml"
    path.write_text(jobs.dump(job_of(folder, **options | steps)))
    return path


def train(folder: Path, data: Path, *, resume: bool = False, **options: Any) -> RankRun:
    """Train in the run folder `folder` on this pool's ranks."""
    ranks = Ranks.of(None, torch.device("cpu"))
    job = job_of(data, **options)
    text = jobs.dump(job)
    source = str(folder) if resume else "never"
    opened = open_run(job, run_dir=folder, resume=source, say=print, ranks=ranks)
    run = opened.run
    with run, RunLog(run, job, Console(quiet=True), ranks.rank) as log:
        context = assemble(job, ranks=ranks)
        trainer = trainer_of(job, context, run, log)
        if opened.checkpoint is not None:
            assert trainer.resume(opened.checkpoint, opened.skip) and not opened.damaged
        assert opened.begin(job=text, resolved=text, ranks=ranks) == []
        log.started(context, trainer.progress)
        status = trainer.train(Requests(folder) if ranks.rank == 0 else None, StopRequests())
        log.ended(status)
        context.optimizer.close()
    rank = ranks.rank
    ranks.close()
    steps = events_of_rank(folder, schema.Step, rank)
    plan = events_of_rank(folder, schema.RunStarted, rank)[-1].plan
    rows = events_of_rank(folder, schema.Memory, rank)[-1].rows
    return RankRun(
        status=status,
        losses={step.step: step.loss for step in steps},
        val_loss=trainer.progress.val_loss,
        tokens=steps[-1].tokens,
        comm_bytes=steps[-1].comm_bytes,
        d2h_bytes=[step.d2h_bytes for step in steps],
        ranks_ms=steps[-1].ranks_ms,
        busy_ms=steps[-1].busy_ms,
        planned={
            (tier, owner): size
            for tier, owners in plan["memory"].items()
            for owner, size in owners.items()
            if size
        },
        allocated={(row.tier, row.owner): row.num_bytes for row in rows if row.num_bytes},
        parts={key: plan[key] for key in ("stage", "part") if key in plan},
    )


def convert(folder: Path, into: Path, data: Path, **options: Any) -> None:
    """Load the newest checkpoint of a run on this division of ranks, and save it unchanged."""
    ranks = Ranks.of(None, torch.device("cpu"))
    context = assemble(job_of(data, **options), ranks=ranks)
    source = newest(folder)
    module, optimizer = context.model.module, context.optimizer
    delayed = restore(source, module, optimizer, ranks)
    optimizer.finish_load(**source.state["optimizer"], delayed=delayed)
    save(into / "checkpoints", source.step, module, optimizer, source.state, ranks=ranks)
    optimizer.close()
    ranks.close()


# What a run folder says.


def events_of_rank(folder: Path, kind: type[AnyEvent], rank: int = 0) -> list[AnyEvent]:
    log = log_lines.read(folder / "events" / f"rank{rank:03d}.jsonl")
    return [record.event for record in log if isinstance(record.event, kind)]


def figures(folder: Path, rank: int = 0) -> list[tuple[Any, ...]]:
    """Return all that is exact about each step, as this rank has logged it."""
    return [
        # As text, in which a norm that is no number equals itself.
        (e.step, e.loss, str(e.grad_norm), e.clip_coef, e.lr, e.loss_scale, e.skipped)
        for e in events_of_rank(folder, schema.Step, rank)
    ]


def without_loss(steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Drop the loss from figures: it is a mean over the ranks, whose number may differ."""
    return [(number, *rest) for number, _, *rest in steps]


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.val_loss) for event in events_of_rank(folder, schema.Eval)]


def newest(folder: Path) -> checkpoint.Checkpoint:
    """Return the newest checkpoint of a run, verified."""
    source = checkpoint.newest_good(folder / "checkpoints", lambda path, why: None)
    assert source is not None
    return source


def saved_tensors(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Read the newest checkpoint: (parameter, kind) → its values, in the parameter's shape.

    Scales and packed codes, which are fewer, come as they lie in the files. Every element of every
    tensor must be there once.
    """
    source = newest(folder)
    pieces: dict[tuple[str, str], list[Entry]] = {}
    for entry in source.manifest.entries:
        pieces.setdefault((entry.name, entry.kind), []).append(entry)
    tensors = {}
    for key, parts in pieces.items():
        parts.sort(key=lambda entry: entry.lo)
        assert_tiled(key, parts)
        values = torch.cat([_in_memory_order(read_whole(source, entry)) for entry in parts])
        shape, stride = parts[0].shape, parts[0].stride
        is_whole = values.numel() == math.prod(shape)
        tensors[key] = values.as_strided(shape, stride) if is_whole else values
    return tensors


def _in_memory_order(values: torch.Tensor) -> torch.Tensor:
    return values.as_strided((values.numel(),), (1,))


def assert_tiled(key: tuple[str, str], parts: Iterable[Entry]) -> None:
    """Check that sorted parts cover the tensor without a gap or an overlap."""
    end, entry = 0, None
    for entry in parts:
        assert entry.lo == end, key
        end = entry.hi
    assert entry is not None and end == math.prod(entry.shape), key


def master_difference(first: Path, second: Path) -> float:
    """Return the largest difference of a master weight between two runs with fp32 state."""
    a, b = saved_tensors(first), saved_tensors(second)
    assert a.keys() == b.keys()
    masters = [key for key in a if key[1] == "master"]
    assert masters
    return max(float((a[key] - b[key]).abs().max()) for key in masters)


def assert_same_state(first: Path, second: Path) -> None:
    """Compare the newest checkpoints: state, weights that are saved with it, and the number of
    updates of each expert."""
    steps, expected_steps = (newest(folder).state["optimizer"] for folder in (first, second))
    assert steps.get("expert_steps") == expected_steps.get("expert_steps")
    a, b = saved_tensors(first), saved_tensors(second)
    assert a.keys() == b.keys() and a
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model, opened as `generate` and `export` open it."""
    module = language_model(open_saved(folder), torch.device("cpu")).module
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_run(expected: Path, run: Path, ranks: int) -> None:
    """Compare the figures of each step on each rank, and the final state and weights."""
    for rank in range(ranks):
        assert figures(run, rank) == figures(expected), rank
    assert_same_state(run, expected)
    first, second = model_weights(expected), model_weights(run)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def losses_are_close(first: dict[int, float], second: dict[int, float], rel: float) -> bool:
    assert first.keys() == second.keys()
    return all(math.isclose(first[step], second[step], rel_tol=rel) for step in first)


TORCH_OWNERS = {("device", owner) for owner in ("activations", "logits and loss", "gradients")}
"""The plan estimates what torch allocates; the engine's Ledger does not count it."""


def assert_as_planned(run: RankRun) -> None:
    """Compare planned and allocated bytes of each owner on each tier."""
    planned = {key: size for key, size in run.planned.items() if key not in TORCH_OWNERS}
    allocated = {key: size for key, size in run.allocated.items() if key not in TORCH_OWNERS}
    assert planned == allocated
