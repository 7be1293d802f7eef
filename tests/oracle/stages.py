"""Pipelines: the stages of a rank, and the scripts that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.loss import cross_entropy
from offloadtrain.model.transformer import Transformer
from offloadtrain.parallel.pipeline.steps import Pipeline
from tests.numerics.models import VOCAB, WIDTH
from tests.oracle.cases import Case
from tests.oracle.scripts import STEPS, Discarded, Loop, load_older_weights

SHAPE = ModelShape(
    vocab_size=VOCAB,
    num_layers=4,
    d_model=WIDTH,
    num_heads=2,
    d_ff=40,
    max_seq_len=16,
)
ROWS, LENGTH = 2, 10


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def staged(case: Case, mesh: DeviceMesh, rule: Any, options: dict[str, Any]) -> Pipeline:
    return ot.pipeline(
        Transformer(SHAPE, seed=1),
        mesh,
        rule,
        example=torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        microbatches=case.accum,
        loss_fn=loss_of,
        schedule=case.schedule,
        stages_per_rank=2 if case.schedule == "interleaved" else 1,
        **options,
    )


class StagedLoop(Loop):
    """Trains the stages of a pipeline."""

    def __init__(self, case: Case, pipeline: Pipeline) -> None:
        super().__init__(case, pipeline.module, pipeline.optimizers[0], iter(()))
        self.pipeline = pipeline
        self._generator = torch.Generator().manual_seed(7)

    def run(self) -> None:
        SCRIPTS[self.case.script](self)
        self.pipeline.drain()
        self._say()
        self.pipeline.optimizer.synchronize()

    def close(self) -> None:
        self.pipeline.close()

    def inputs(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """Return new tokens and targets of this replica."""
        replicas = self.pipeline.replicas
        rows = replicas.size * microbatches * ROWS
        drawn = torch.randint(VOCAB, (rows, LENGTH + 1), generator=self._generator)
        rows_BT = drawn.chunk(replicas.size)[replicas.rank]
        return rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].contiguous()

    def step(self, *, skip: bool = False) -> None:
        tokens, targets = self.inputs(self.case.accum)
        self.pipeline.run(tokens, target=targets)
        self.pipeline.step(skip=skip)
        self._say()

    def _say(self) -> None:
        """Note the report of a step that was decided since the last call."""
        report = self.optimizer.last_step
        if report is not None and len(self.reports) < report.step:
            self.say(report)


def four_steps(loop: StagedLoop) -> None:
    for _ in range(STEPS):
        loop.step()


def some_steps_skip(loop: StagedLoop) -> None:
    for number in range(STEPS + 1):
        loop.step(skip=number in (1, 3))


def evaluates(loop: StagedLoop) -> None:
    """Evaluate before each step."""
    for _ in range(STEPS):
        loop.pipeline.drain()
        tokens, targets = loop.inputs(1)
        loop.pipeline.evaluate(tokens, target=targets)
        loop.step()


def saves(loop: StagedLoop) -> None:
    """Save after the first step, and after the third while the fourth runs. Without a flush, the
    microbatches in flight end first."""
    optimizer = loop.pipeline.optimizer
    for number in range(STEPS):
        loop.step()
        if number in (0, 2):
            loop.pipeline.drain(newest=False)
            optimizer.write_state(Discarded())
        if number == 1:
            optimizer.finish_writing()
    optimizer.finish_writing()


def loads_older_weights(loop: StagedLoop) -> None:
    loop.step()
    loop.step()
    loop.pipeline.drain(newest=False)
    load_older_weights(loop.pipeline.optimizer)
    loop.step()
    loop.step()


SCRIPTS: dict[str, Callable[[StagedLoop], None]] = {
    "four steps": four_steps,
    "some steps skip": some_steps_skip,
    "evaluates": evaluates,
    "saves": saves,
    "loads older weights": loads_older_weights,
}
