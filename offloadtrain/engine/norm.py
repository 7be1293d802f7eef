"""The norm of a step's gradient, which is one over all ranks and stages, and their agreement.

[Note: One norm]
A pipeline's stages hold different parameters of one model, so none of them knows the norm alone.
Each measures the squares of its own parameters, summed over its data-parallel ranks; the stages
exchange these, and every stage adds all of them: stage by stage, parameter by parameter, in fp64.
That is the order in which one process adds them, so the norm, the clip coefficient and the decision
to skip are those of one process, bit for bit. A process with several stages exchanges once: the
first of them that is asked measures all, and the others take what was found.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.functions import Functions
from offloadtrain.engine.gradients import Gradients, Measured
from offloadtrain.engine.part_checks import check_same_gradients
from offloadtrain.runtime.process_group import ALONE, RankError, Ranks


class EngineError(OffloadTrainError):
    """A call that makes no sense in the phase the step is in."""


@dataclass(slots=True)
class Norm:
    """The norm of the step's gradient, unscaled. It is measured once; clipping multiplies
    coefficients.

    [Note: Clipping]
    `clip_grad_norm_(max_norm)` sees the norm times all coefficients so far and multiplies them by
    `min(1, max_norm / (that + 1e-6))`; so does `clip_norm` in step(), which comes last. All of it
    is fp64; the product is rounded once, where Adam multiplies the gradient by it.
    """

    value: float
    nonfinite: Mapping[str, tuple[int, ...]]
    coef: float = 1.0

    @property
    def clipped(self) -> float:
        return self.value * self.coef

    def clip(self, max_norm: float) -> None:
        coef = max_norm / (self.clipped + 1e-6)
        self.coef *= 1.0 if coef > 1.0 else coef  # NaN stays, as in torch's clip_grad_norm_


class Stages:
    """The stages of one pipeline in this process, in order, and the processes of the others.

    Process r of p holds stages r, r + p, r + 2p and so on.
    """

    def __init__(self, ranks: Ranks) -> None:
        """`ranks`: the processes of the pipeline, in the order of their first stages."""
        self.ranks = ranks
        # Weak: an optimizer that is dropped without close() must end at once.
        self._members: list[weakref.ref[NormMeasure]] = []
        self._names: list[list[str]] = []
        self._measured: dict[NormMeasure, Measured] = {}
        self._sent_intent: Sequence[float] = ()
        """The intent of the last exchange."""

    def join(self, member: NormMeasure) -> None:
        """Add this process's next stage."""
        self._members.append(weakref.ref(member))

    def send(self, member: NormMeasure, intent: Sequence[float]) -> Callable[[], Measured]:
        """Send the squares of this process's parameters to the other stages; the first call of a
        step begins a collective.

        Args:
            intent: what must be the same on every process, see `NormMeasure.send`.

        Returns:
            A function that waits for the other stages, and returns the squares of all. It raises
            RankError if they disagree about the step.
        """
        if self.ranks.is_single and len(self._members) == 1:
            result = member.own(intent)
            return lambda: result
        receive = None
        if member not in self._measured:
            receive, self._sent_intent = self._exchange(intent), intent
        elif [*intent] != [*self._sent_intent]:
            raise RankError(
                f"stages of one process disagree in step {int(intent[0]) + 1}: clip_grad_norm_ and "
                "skips are the same for each of pipeline.optimizers"
            )

        def measured() -> Measured:
            if receive is not None:
                receive()
            return self._measured.pop(member)

        return measured

    def agree_on_names(self) -> None:
        """Exchange the names of all stages' parameters, once: now, and not with the first squares,
        where all stages would wait for the last one.

        Raises:
            RankError: a parameter is in two stages, or processes have different numbers of stages.
        """
        if self._names:
            return
        of_processes = self.ranks.gather([member.names for member in self._alive()])
        if len({len(stage_names) for stage_names in of_processes}) > 1:
            counts = ", ".join(str(len(stage_names)) for stage_names in of_processes)
            raise RankError(f"the processes of a pipeline hold {counts} stages: give each as many")
        # In the order of the model.
        stages = [names for of_each in zip(*of_processes, strict=True) for names in of_each]
        owner: dict[str, int] = {}
        for stage, names in enumerate(stages):
            for name in filter(None, names):
                if owner.setdefault(name, stage) != stage:
                    raise RankError(
                        f"parameter '{name}' is in stages {owner[name]} and {stage} of the "
                        "pipeline: each parameter is one stage's, and names are the whole model's"
                    )
        self._names = stages

    def _alive(self) -> list[NormMeasure]:
        return [member for ref in self._members if (member := ref()) is not None]

    def _exchange(self, intent: Sequence[float]) -> Callable[[], None]:
        members = self._alive()
        measurements = [member.own(intent) for member in members]
        rows = [
            [*member.counts, *measured.of_parameter]
            for member, measured in zip(members, measurements, strict=True)
        ]
        self.agree_on_names()
        longest = len(members[0].counts) + max(map(len, self._names))
        padded = [row + [0.0] * (longest - len(row)) for row in rows]
        sent = self.ranks.send_host([*intent, *(x for row in padded for x in row)])

        def receive() -> None:
            # Waits for every stage's squares: the first stage's backward ends last.
            self._add_up(sent(), members, measurements, intent)

        return receive

    def _add_up(
        self,
        rows: Tensor,
        members: Sequence[NormMeasure],
        measurements: Sequence[Measured],
        intent: Sequence[float],
    ) -> None:
        """Take in what all stages have sent, (processes, n)."""
        _check_alike(rows[:, : len(intent)], "stage", _OF_ALL, intent[0])
        of_stages = rows[:, len(intent) :].reshape(self.ranks.size, len(members), -1)
        # Of all processes' first stages, then of all second ones: in the order of the model.
        of_stages = of_stages.transpose(0, 1).flatten(0, 1)
        count = len(members[0].counts)
        _check_alike(of_stages[:, :count], "stage", _OF_STAGES, intent[0])
        squares = [
            row[count : count + len(names)].tolist()
            for row, names in zip(of_stages, self._names, strict=True)
        ]
        all_squares = [value for of_stage in squares for value in of_stage]
        # Non-finite parameters → ranks whose shards have them; known for own stages only.
        known = {
            name: ranks for measured in measurements for name, ranks in measured.nonfinite.items()
        }
        pairs = zip(self._names, squares, strict=True)
        named = [pair for names, row in pairs for pair in zip(names, row, strict=True)]
        nonfinite = {name: known.get(name, ()) for name, value in named if not math.isfinite(value)}
        for member, measured in zip(members, measurements, strict=True):
            self._measured[member] = Measured(all_squares, nonfinite, measured.told)


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A model as one stage of a pipeline, and as one part of tensor parallelism.

    Attributes:
        first: the number of its first parameter in the whole model, by which stochastic rounding
            draws.
        parts: the ranks that hold the other parts of its DTensors.
        kept: versions of its working weights, see [Note: Two versions] in
        `step.program.two_versions`, and
            sums of its gradients: two, where a step is decided after the next one's have begun.
        in_order: each backward is that of the oldest forward without one.
    """

    stages: Stages
    first: int = 0
    parts: Ranks = ALONE
    kept: tuple[int, int] = (1, 1)
    in_order: bool = False


class NormMeasure:
    """Measures the norm of one engine's step, together with the other stages'.

    Attributes:
        names: of the model's parameters, in order; "" stands for one that is not trained.
    """

    def __init__(
        self, gradients: Gradients, functions: Functions, ranks: Ranks, place: StagePlace
    ) -> None:
        self._gradients, self._functions = gradients, functions
        self._ranks, self._stages, self._parts = ranks, place.stages, place.parts
        self.names = gradients.names
        self._written: dict[str, int] = {}
        """What this rank has loaded or written since the step before → checksums."""
        place.stages.join(self)

    @property
    def counts(self) -> list[float]:
        """Return the number of backwards, which must be the same in every stage."""
        return [float(self._gradients.micro_steps)]

    def measure(
        self,
        asker: str,
        step_count: int,
        loss_scale: float,
        max_norm: float | None = None,
        *,
        skip: bool = False,
    ) -> Norm:
        """Wait for the norm of the step, here and on every rank and stage.

        Args:
            skip: the step will be skipped, on every rank.

        Raises:
            EngineError: no gradient has arrived since the last step.
            RankError: ranks disagree about the step.
        """
        return self.send(asker, step_count, loss_scale, max_norm, skip=skip)()

    def send(
        self,
        asker: str,
        step_count: int,
        loss_scale: float,
        max_norm: float | None = None,
        *,
        skip: bool = False,
    ) -> Callable[[], Norm]:
        """Wait for the squares of this stage, and send them to the others.

        Returns:
            A function that waits for the other stages; raises as `measure`.
        """
        # A plain backward leaves its micro-step open: its last blocks are sent here.
        self._gradients.end_micro_step()
        if self._gradients.micro_steps == 0:
            raise EngineError(
                f"{asker}() without a backward: no parameter of the model has received a gradient "
                "since the last step"
            )
        receive = self._stages.send(self, [step_count, _digest(max_norm), float(skip)])

        def norm() -> Norm:
            measured = receive()
            self._check_ranks(self._ranks, measured.told, step_count)
            value = math.sqrt(measured.squares) / (loss_scale * self._ranks.everyone.size)
            return Norm(value, measured.nonfinite)

        return norm

    def own(self, intent: Sequence[float]) -> Measured:
        """Measure this stage's parameters over its data-parallel ranks, which send `intent`."""
        self._gradients.end_micro_step()
        measured = self._gradients.measure(self._intent(intent), self._parts)
        copies = self._ranks.copies
        if not copies.is_single:
            # This shard's ranks of all groups hold copies of it, which must be decided on alike and
            # have got the same gradient; see [Note: Copies] in `runtime.process_group`.
            intent_sent = measured.told[self._ranks.rank].tolist()
            rows = copies.all_gather_host(
                [*intent_sent, _digest(measured.of_parameter), _agree(measured.told)]
            )
            self._check_ranks(self._ranks, measured.told, intent[0])
            _check_alike(rows, "copy", (*_WHAT, "the sums of squares", _AGREEMENT), intent[0])
        return measured if self._parts.is_single else self._of_all_parts(measured, intent)

    def _of_all_parts(self, measured: Measured, intent: Sequence[float]) -> Measured:
        """Add the squares of the other parts of DTensors in rank order. A tensor that every rank
        holds in full counts once, with the first rank's value."""
        same = [*self._intent_of_part(intent), _agree(measured.told)]
        # Waits for the same backward on the other ranks.
        rows = self._parts.all_gather_host([*same, *measured.of_parameter])
        num_same, divided = len(same), self._gradients.divided
        # After the exchange, in which the other parts wait.
        self._check_ranks(self._ranks, measured.told, intent[0])
        _check_alike(rows[:, :num_same], "part", (*_OF_PARTS, _AGREEMENT), intent[0])
        check_same_gradients(self.names, rows[:, num_same:], divided, int(intent[0]))
        sums, nonfinite = [], dict(measured.nonfinite)
        for index, values in enumerate(rows[:, num_same:].T.tolist()):
            # All parts skip a step in which one of them has had an overflow.
            once = index not in divided and all(map(math.isfinite, values))
            total = 0.0
            for value in values[:1] if once else values:
                total += value
            if not math.isfinite(total):
                nonfinite.setdefault(self.names[index], ())
            sums.append(total)
        return Measured(sums, nonfinite, measured.told)

    def check_after_clipping(self, step_count: int, coef: float, *, skip: bool) -> None:
        """Compare what may have changed since `clip_grad_norm_()` has waited for the norm.

        Raises:
            RankError: ranks disagree about the step.
        """
        intent = [step_count, _digest(coef), float(skip)]
        if not self._ranks.is_single:
            rows = self._ranks.everyone.all_gather_host(self._intent(intent))
            self._check_ranks(self._ranks.everyone, rows, step_count)
        if not self._parts.is_single:
            rows = self._parts.all_gather_host(self._intent_of_part(intent))
            _check_alike(rows, "part", _OF_PARTS, step_count)

    def _check_ranks(self, ranks: Ranks, rows: Tensor, step_count: float) -> None:
        """Raises RankError unless all of `ranks` are about to do the same."""
        # Every rank sees the same rows: all of them exchange the names here, or none.
        if rows.shape[1] and not bool((rows[:, -1] == rows[0, -1]).all()):
            _check_written(ranks.gather(self._written), int(step_count) + 1)
        _check_alike(rows, "rank", _WHAT, step_count)

    def _intent(self, intent: Sequence[float]) -> list[float]:
        """Return what must be the same on every data-parallel rank, in the order of `_WHAT`."""
        if self._ranks.is_single:
            return []
        self._written = self._functions.take_written()
        written = _digest(sorted(self._written.items()))
        return [*self._intent_of_part(intent), self._functions.take_digest(), written]

    def _intent_of_part(self, intent: Sequence[float]) -> list[float]:
        """Return what must be the same on all parts, in the order of `_OF_PARTS`: of what each
        holds whole, a rate of one part's own would make several weights."""
        return [*intent, *self.counts, _digest(self._functions.hyperparameters())]


_OF_ALL = ("the step count", "clip_grad_norm_", "the skips asked for")
_OF_STAGES = ("the number of backwards",)
_OF_PARTS = (*_OF_ALL, *_OF_STAGES, "hyperparameters")
_AGREEMENT = "the agreement among the ranks"
"""Where a part's replicas, or a copy's ranks, differ, all others end with them."""
_WHAT = (*_OF_PARTS, "the collectives", "the weights loaded or written since the last step")


def _check_written(of_ranks: Sequence[Mapping[str, int]], step: int) -> None:
    """Raises RankError for the first name whose checksums differ."""
    for rank, written in enumerate(of_ranks):
        apart = dict(set(written.items()) ^ set(of_ranks[0].items()))
        if apart:
            more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
            raise RankError(
                f"ranks disagree in step {step}: '{min(apart)}'{more} was loaded or written since "
                f"the last step, and on rank {rank} not with the values of rank 0. Give every rank "
                "the same"
            )


def _agree(rows: Tensor) -> float:
    return float(rows.eq(rows[:1]).all())


def _digest(value: object) -> float:
    return float(crc32(repr(value).encode()))


def _check_alike(rows: Tensor, each: str, what: Sequence[str], step_count: float) -> None:
    """Check that all have launched the same collectives and are about to do the same update.

    Args:
        rows: (ranks, n) fp64 on the host, the intent of each; `what` names its columns.

    Raises:
        RankError: naming the first one that differs from the first.
    """
    for number, row in enumerate(rows):
        if not row.equal(rows[0]):
            differs = what[int((row != rows[0]).nonzero()[0, 0])]
            raise RankError(
                f"ranks disagree in step {int(step_count) + 1}: {differs} of {each} {number} are "
                f"not those of {each} 0. Every rank must run the same model and schedule"
                + ("; only its batches differ" if each in ("rank", "copy") else "")
            )
