"""The [train] section of a job, and what of it cannot stand together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offloadtrain.config.offload import OffloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The training loop. Zero in an `…_every` key means never.

    Attributes:
        steps: optimizer steps of the whole run.
        micro_batch: sequences per forward.
        grad_accum_steps: microbatches per step.
        global_batch_tokens: tokens per step; if set, `grad_accum_steps` follows from it.
        chunked_loss: compute the logits in parts of the vocabulary. They then take the memory of a
            few parts instead of two copies of the whole; the head's product is computed twice.
        label_smoothing, z_loss: weights of two more terms of the training loss, which validation
            leaves out; with `chunked_loss` only.
        eval_every: steps between evaluations on the held-out tokens.
        eval_batches: microbatches of one evaluation.
        checkpoint_every: steps between checkpoints; one is also made at the end and at a stop.
        keep_last: how many of the newest checkpoints are kept.
        keep_every: also keep the checkpoints of steps divisible by it; 0: none.
        checkpoint_spill: bytes of each rank's host memory into which a save copies the state that
            it writes last, so that the next update waits less; 0: none. With `checkpoint_every` and
            state on the host only.
        on_spike: what a spike of the loss does to its step. "report": an alert is raised, and the
            step is taken; "skip": the step is skipped; "rollback": the step is skipped, and the run
            returns to its last checkpoint and continues with the data behind the spike.
        spike_score: a loss is a spike if it is this many robust standard deviations above the last
            ones.
        max_rollbacks: largest number of rollbacks in a run; the next spike ends it.
        log_every_s: seconds between plain console lines.
        hang_timeout_s: least seconds without progress that end the run as hung; 0: never.
            The limit rises to four times the longest silence that the same phase came out of.
        sample_tokens: length of the text generated at the end; 0: none.
        sample_prompt: what it continues; empty: nothing, as at the begin of a document.
        seed: of the first weights, of dropout and of the order of the data.
        deterministic: only torch's deterministic kernels, which repeat a GPU's bits.
        on_alert, on_end: a command and its arguments. Rank 0 runs it without a shell when an alert
            is raised, or when this start ends; OFFLOADTRAIN_… variables say what happened.
    """

    steps: int
    micro_batch: int = 8
    grad_accum_steps: int = 1
    global_batch_tokens: int = 0
    chunked_loss: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    eval_every: int = 0
    eval_batches: int = 8
    checkpoint_every: int = 0
    keep_last: int = 2
    keep_every: int = 0
    checkpoint_spill: int = 64 << 20
    on_spike: Literal["report", "skip", "rollback"] = "report"
    spike_score: float = 8.0
    max_rollbacks: int = 3
    log_every_s: float = 5.0
    hang_timeout_s: float = 60.0
    sample_tokens: int = 0
    sample_prompt: str = ""
    on_alert: tuple[str, ...] = ()
    on_end: tuple[str, ...] = ()
    seed: int = 1234
    deterministic: bool = False


def contradictions(train: TrainConfig, offload: OffloadConfig) -> Iterator[str]:
    """Yield a sentence for each broken rule."""
    for key in ("label_smoothing", "z_loss"):
        if (value := getattr(train, key)) and not train.chunked_loss:
            yield f"train.{key} = {value} needs train.chunked_loss = true"
    if train.on_spike != "report" and offload.updates_early:
        yield (
            f'train.on_spike = "{train.on_spike}" decides before the update, but with '
            "offload.skip_nonfinite = false and no offload.clip_norm Adam runs inside backward: "
            "set one of them"
        )
    if train.on_spike == "rollback" and not train.checkpoint_every:
        yield 'train.on_spike = "rollback" goes back to checkpoints: set train.checkpoint_every'
    if train.sample_prompt and not train.sample_tokens:
        yield "train.sample_prompt is set though train.sample_tokens = 0 samples nothing"
