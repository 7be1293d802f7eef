"""What a run does: four steps, and what users do between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import Lane
from offloadtrain.step.program.operations import Written
from tests.numerics.models import loss_of
from tests.oracle.cases import Case

if TYPE_CHECKING:
    from offloadtrain.parallel.pipeline.stage_optimizers import StageOptimizers

STEPS = 4
INFINITY = float("inf")


class PlantedError(Exception):
    """Raised inside a backward."""


@dataclass(slots=True)
class Loop:
    """A model, its optimizer, and the batches that it has not seen.

    Attributes:
        said: a line per step, of what its report says.
    """

    case: Case
    model: nn.Module
    optimizer: ot.OffloadOptimizer
    stream: Iterator[Tensor]
    reports: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run the script, and wait until the lanes are empty."""
        SCRIPTS[self.case.script](self)
        self.optimizer.synchronize()

    def close(self) -> None:
        self.optimizer.close()

    def loss(self) -> Tensor:
        """Of the next batch."""
        return loss_of(self.model, next(self.stream))

    def backward(self, loss: Tensor, *, keep: bool = False) -> None:
        if self.case.backward == "explicit":
            self.optimizer.backward(loss)
        else:
            (loss / self.case.accum).backward(retain_graph=keep)

    def micro_steps(self, count: int | None = None) -> None:
        for _ in range(self.case.accum if count is None else count):
            self.backward(self.loss())

    def update(self) -> None:
        self.optimizer.step()
        report = self.optimizer.last_step
        assert report is not None
        self.say(report)

    def say(self, report: ot.StepReport) -> None:
        self.reports.append(
            f"step {report.step}: {'skipped' if report.skipped else 'applied'}, "
            f"{'clipped' if report.clip_coef < 1 else 'not clipped'}, "
            f"{report.micro_steps} micro-steps, {report.early_buckets} buckets early, "
            f"guessed right: {report.speculation_hit}, bytes down {report.d2h_bytes}, "
            f"up {report.h2d_bytes}, to ranks {report.comm_bytes}"
        )

    def step(self) -> None:
        self.micro_steps()
        self.update()


def four_steps(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.step()


def some_steps_skip(loop: Loop) -> None:
    for factor in (1.0, INFINITY, 1.0, INFINITY, INFINITY, 1.0):
        loop.backward(loop.loss() * factor)
        loop.micro_steps(loop.case.accum - 1)
        loop.update()


def clips_by_hand(loop: Loop) -> None:
    for norms in ((INFINITY,), (0.01,), (), (1e9, 0.02, 0.01)):
        loop.micro_steps()
        for norm in norms:
            loop.optimizer.clip_grad_norm_(norm)
        loop.update()


def two_backwards_in_a_micro_step(loop: Loop) -> None:
    for _ in range(STEPS):
        for _ in range(loop.case.accum):
            loss = loop.loss()
            loop.backward(loss, keep=True)
            loop.backward(loss)
        loop.update()


def synchronizes(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.step()
        loop.optimizer.synchronize()


def loads_its_state(loop: Loop) -> None:
    """The optimizer's, and weights that the model has not had."""
    loop.step()
    loop.step()
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.step()
    if loop.case.ranks == 1:
        weights = {name: value.float() * 0.5 for name, value in loop.model.state_dict().items()}
        loop.model.load_state_dict(weights)
    loop.step()
    loop.step()


def evaluates(loop: Loop) -> None:
    """Before the first step, within one, and twice between two."""
    evaluate(loop)
    loop.step()
    evaluate(loop)
    evaluate(loop)
    loop.micro_steps(1)
    evaluate(loop)
    loop.micro_steps(loop.case.accum - 1)
    loop.update()
    evaluate(loop)
    loop.step()
    loop.step()


def evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.loss()
    loop.model.train()


def drops_gradients(loop: Loop) -> None:
    """In the first step, in an ordinary one, and where a whole step was there."""
    loop.micro_steps(1)
    loop.optimizer.zero_grad()
    loop.step()
    loop.step()
    loop.micro_steps(1)
    loop.optimizer.zero_grad()
    loop.step()
    loop.micro_steps()
    loop.optimizer.zero_grad()
    loop.step()


def keeps_its_graphs(loop: Loop) -> None:
    """Until the step is over, and until the next backward is."""
    graphs: list[Tensor] = []
    for number in range(STEPS):
        for _ in range(loop.case.accum):
            loss = loop.loss()
            loop.backward(loss, keep=True)
            graphs.append(loss)
            del loss
        if number == 2:
            graphs.clear()
        loop.update()
        del graphs[: -loop.case.accum]


def a_backward_fails(loop: Loop) -> None:
    """At the first block, when the others have delivered."""
    param = next(loop.model.parameters())

    def fail(grad: Tensor) -> None:
        raise PlantedError

    loop.step()
    for _ in range(2):
        handle = param.register_hook(fail)
        try:
            loop.backward(loop.loss())
        except PlantedError:
            handle.remove()
        loop.step()
    loop.step()


def forwards_first(loop: Loop) -> None:
    """As pipelines do: backwards follow each other."""
    for _ in range(STEPS):
        losses = [loop.loss() for _ in range(loop.case.accum)]
        while losses:
            loop.backward(losses.pop())
            loop.optimizer.end_micro_step()
        loop.update()


def a_forward_is_for_nothing(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.loss()
        loop.step()


def rates_change(loop: Loop) -> None:
    """Between backward and step, and before backward."""
    for number in range(STEPS):
        loop.micro_steps()
        if number != 1:
            loop.optimizer.param_groups[0]["lr"] *= 0.5
        loop.update()


def shows_its_weights(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.step()
        for _name, _weight in loop.optimizer.full_weights():
            pass


def too_few_microbatches(loop: Loop) -> None:
    loop.step()
    loop.micro_steps(1)
    loop.update()
    loop.step()
    loop.step()


def some_get_nothing(loop: Loop) -> None:
    """Microbatches whose turn is not the model's: whole blocks get no gradient in a step."""
    for number in range(STEPS):
        if number % 2:
            evaluate(loop)
        loop.micro_steps(1)
        evaluate(loop)
        loop.micro_steps(1)
        loop.update()


class Discarded:
    """A state writer that writes nothing."""

    def write(self, bucket: str, parts: Sequence[tuple[Written, Tensor]]) -> None: ...

    def finish(self) -> None: ...


def saves(loop: Loop) -> None:
    """Save after the first step, and after the third while the fourth runs."""
    for number in range(STEPS):
        loop.step()
        if number in (0, 2):
            loop.optimizer.write_state(Discarded())
        if number == 1:
            loop.optimizer.finish_writing()
    loop.optimizer.finish_writing()


def averages(loop: Loop) -> None:
    """Average the weights after each step but the second, and read the averages after the third."""
    ema = ot.EMA(loop.optimizer)
    for number in range(STEPS):
        loop.step()
        if number != 1:
            ema.update()
        if number == 2:
            dict(ema.weights())


def loads_older_weights(loop: Loop) -> None:
    """Load the state and the older weights in use, as a checkpoint of mode "delayed" has them."""
    loop.step()
    loop.step()
    load_older_weights(loop.optimizer)
    loop.step()
    loop.step()


def load_older_weights(optimizer: ot.OffloadOptimizer | StageOptimizers) -> None:
    """Load the state and the weights in use that the optimizer has."""
    optimizer.own_states()
    optimizer.own_weights()
    optimizer.finish_load(step=2, scaler=optimizer.scaler_state(), delayed=True)


def a_launch_fails(loop: Loop) -> None:
    """A copy down fails in two steps; zero_grad() gives each of them up."""
    lanes = loop.optimizer.lanes
    launch = lanes.launch

    def fail(lane: Lane, name: str, *more: Any) -> None:
        if name == "d2h layers.1":
            raise PlantedError
        launch(lane, name, *more)

    loop.step()
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(PlantedError):
            patch.setattr(lanes, "launch", fail)
            loop.micro_steps()
        loop.optimizer.zero_grad()
        loop.step()
    loop.step()


SCRIPTS: dict[str, Callable[[Loop], None]] = {
    "four steps": four_steps,
    "some steps skip": some_steps_skip,
    "clips by hand": clips_by_hand,
    "the odds decide": clips_by_hand,
    "two backwards in a micro-step": two_backwards_in_a_micro_step,
    "synchronizes": synchronizes,
    "loads its state": loads_its_state,
    "evaluates": evaluates,
    "drops gradients": drops_gradients,
    "keeps its graphs": keeps_its_graphs,
    "a backward fails": a_backward_fails,
    "forwards first": forwards_first,
    "a forward is for nothing": a_forward_is_for_nothing,
    "rates change": rates_change,
    "shows its weights": shows_its_weights,
    "too few microbatches": too_few_microbatches,
    "some get nothing": some_get_nothing,
    "saves": saves,
    "averages": averages,
    "loads older weights": loads_older_weights,
    "a launch fails": a_launch_fails,
}
