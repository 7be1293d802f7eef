"""The norm of a step's gradient, over all ranks, and the agreement of ranks about the step.

[Note: One norm]
Sums of squares are added parameter by parameter, in the order of the model, in fp64: so the norm,
the clip coefficient and the decision to skip are those of a single process, bit for bit. If other
engines hold other parts of the model, `Division.norm` adds theirs: [Note: Divisions] in
`engine.division`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from zlib import crc32

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.buffers import MemoryMap
from offloadtrain.engine.division import Division, Measured, Usage
from offloadtrain.engine.gradients import Gradients
from offloadtrain.engine.interpreter import Functions, Interpreter
from offloadtrain.runtime.lanes import Buffer
from offloadtrain.runtime.process_group import RankError, Ranks
from offloadtrain.runtime.tensor_parts import is_divided
from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.program import Program


class EngineError(OffloadTrainError):
    """A call that is not allowed in the present phase of the step."""


@dataclass(slots=True)
class Norm:
    """The norm of the step's gradient, unscaled. It is measured once; clipping multiplies
    coefficients.

    Attributes:
        of_parameter: the norm of each of the model's parameters, in order.
        is_clipped: True also after clipping with coefficient 1.0.

    [Note: Clipping]
    `clip_grad_norm_(max_norm)` sees the norm times all coefficients so far and multiplies them by
    `min(1, max_norm / (that + 1e-6))`; so does `clip_norm` in step(), which comes last, unless the
    step was already clipped to at most `clip_norm`. All of this is fp64; the product is rounded
    once, when Adam multiplies the gradient by it.
    """

    value: float
    nonfinite: Mapping[str, tuple[int, ...]]
    of_parameter: Sequence[float]
    coef: float = 1.0
    is_clipped: bool = False

    @property
    def clipped(self) -> float:
        return self.value * self.coef

    def clip(self, max_norm: float) -> None:
        coef = max_norm / (self.clipped + 1e-6)
        self.multiply(1.0 if coef > 1.0 else coef)  # NaN stays, as in torch's clip_grad_norm_

    def multiply(self, coef: float) -> None:
        self.coef *= coef
        self.is_clipped = True


class NormMeasure:
    """Measures the norm of an engine's step, together with that of the rest of the model.

    Attributes:
        buckets: trained buckets.
        ranks: the ranks that share the state of the parameters.
        names: names of the model's parameters, in order; "" for a parameter that is not trained.
        divided: indices of the parameters that are divided: other ranks hold the other parts.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        program: Program,
        interpreter: Interpreter,
        memory: MemoryMap,
        gradients: Gradients,
        functions: Functions,
        division: Division,
    ) -> None:
        self.buckets = buckets
        self._program, self._interpreter = program, interpreter
        self._gradients, self._functions = gradients, functions
        self.ranks, self._parts = division.replicas, division.parts
        self._is_single = self.ranks.is_single
        self._skipping, self._exchange = division.skipping, division.norm
        rows = [key for key in memory.table.rows if key.kind is Memory.NORMS]
        rows.sort(key=lambda key: key.version)  # the host's copy of the device's sums comes last
        self._of_tier = {Tier(str(key.bucket)): memory[key].flat for key in rows}
        """Tier that measures → its sums of squares, in memory that the host can read."""
        slots = [slot for bucket in buckets for slot in bucket.slots]
        names = {slot.index: slot.name for slot in slots}
        self.names = [names.get(index, "") for index in range(program.spec.num_tensors)]
        self.divided = {slot.index for slot in slots if is_divided(slot.param)}
        self._usages: dict[Ranks, list[tuple[Usage, Buffer]]] = {}
        """Ranks that share a bucket → usage and marks of its entries."""
        for bucket in buckets:
            if bucket.usage is not None:
                entry = bucket.usage, bucket.buffer(Memory.USED)
                self._usages.setdefault(bucket.sharers, []).append(entry)
        self._written: dict[str, int] = {}
        """Weights written on this rank since the previous step → checksums."""
        if self._exchange is not None:
            self._exchange.join(self)

    @property
    def counts(self) -> list[float]:
        """Number of backwards, which must be equal in every engine."""
        return [float(self._gradients.micro_steps)]

    def send(
        self,
        caller: str,
        step_count: int,
        divisor: float,
        max_norm: float | None = None,
        *,
        skip: bool = False,
    ) -> Callable[[], Norm]:
        """Wait for this engine's sums of squares, and send them to the other engines.

        Args:
            divisor: see `StepCounter.divisor`.
            skip: the step will be skipped, on every rank.

        Returns:
            A function that waits for the other engines. It raises RankError if ranks disagree about
            the step.

        Raises:
            EngineError: no gradient has arrived since the last step.
        """
        # A plain backward leaves its micro-step open: its last blocks are sent here.
        self._gradients.end_micro_step()
        if self._gradients.micro_steps == 0:
            raise EngineError(
                f"{caller}() without a backward: no parameter of the model has received a gradient "
                "since the last step"
            )
        intent = [step_count, digest(max_norm), float(skip)]
        if self._exchange is None:
            measured_here = self.measure_local(intent)
        else:
            receive = self._exchange.send(self, intent)

        def norm() -> Norm:
            measured = measured_here if self._exchange is None else receive()
            self.check_ranks(self.ranks, measured.intents, step_count)
            norms, total = [], 0.0
            for squares in measured.of_parameter:  # added in the order of the model
                norms.append(math.sqrt(squares) / divisor)
                total += squares
            return Norm(math.sqrt(total) / divisor, measured.nonfinite, norms)

        return norm

    def measure_local(self, intent: Sequence[float]) -> Measured:
        """Measure this engine's parameters; waits for the last sum, and for the sums of every rank.

        Each parameter's sum runs over fixed segments (see `kernels`). Ranks are added in their
        order, then parameters in the order of `model.named_parameters()`, so that blocks, buckets
        and groups change no bit.

        Args:
            intent: numbers that every rank sends to the others in the same exchange.
        """
        self._gradients.end_micro_step()
        intent = self._intent(intent)
        # The training thread's only wait for results in a step. The norms of early blocks ran
        # during backward; only the copy of the last block to the host is exposed.
        self._interpreter.run(self._program.norm)
        for ranks, usages in self._usages.items():
            assert self._skipping is not None
            self._skipping.agree(usages, (ranks.everyone, self._parts))
        squares = self._local()
        sent = torch.cat([squares, torch.tensor(intent, dtype=squares.dtype, device="cpu")])
        # A single rank exchanges nothing.
        rows = sent[None] if self._is_single else self.ranks.all_gather_host(sent)
        sums, nonfinite = [], {}
        for index, values in enumerate(rows[:, : squares.numel()].T.tolist()):
            of_parameter = 0.0
            for value in values:
                of_parameter += value
            if not math.isfinite(of_parameter):
                there = (rank for rank, value in enumerate(values) if not math.isfinite(value))
                nonfinite[self.names[index]] = tuple(there)
            sums.append(of_parameter)
        return Measured(sums, nonfinite, rows[:, squares.numel() :])

    def _local(self) -> Tensor:
        """Return this rank's sum of squares of each parameter, (n,) fp64 on the host."""
        # The program's last operations have waited for them.
        gradients = (self._program.buckets[bucket.spec.name].gradient for bucket in self.buckets)
        tiers = [gradient.measured_on for gradient in gradients]
        if len(set(tiers)) == 1:
            return self._of_tier[_measured(tiers[0])]
        squares = torch.zeros(len(self.names), dtype=torch.float64, device="cpu")
        for bucket, tier in zip(self.buckets, tiers, strict=True):
            indices = [slot.index for slot in bucket.slots]
            squares[indices] = self._of_tier[_measured(tier)][indices]
        return squares

    def count_steps(self) -> None:
        """Count a step that is not skipped, for the entries that it updates."""
        for usage, _ in chain.from_iterable(self._usages.values()):
            usage.advance()

    def check_after_clipping(self, step_count: int, coef: float, *, skip: bool) -> None:
        """Compare what may have changed since `clip_grad_norm_()` has waited for the norm.

        Raises:
            RankError: ranks disagree about the step.
        """
        intent = [step_count, digest(coef), float(skip)]
        if not self._is_single:
            rows = self.ranks.everyone.all_gather_host(self._intent(intent))
            self.check_ranks(self.ranks.everyone, rows, step_count)
        if self._exchange is not None:
            self._exchange.compare(self, intent)

    def check_ranks(self, ranks: Ranks, rows: Tensor, step_count: float) -> None:
        """Raises RankError unless all of `ranks` are about to do the same."""
        # Every rank sees the same rows, so either all of them exchange the names here, or none.
        if rows.shape[1] and not bool((rows[:, -1] == rows[0, -1]).all()):
            _check_written(ranks.gather(self._written), int(step_count) + 1)
        check_rows_alike(rows, "rank", RANK_COLUMNS, step_count)

    def _intent(self, intent: Sequence[float]) -> list[float]:
        """Return the values that must be equal on all data-parallel ranks: the `RANK_COLUMNS`."""
        if self._is_single:
            return []
        self._written = self._functions.digests.take_weights()
        written = digest(sorted(self._written.items()))
        return [*self.intent_of_part(intent), self._functions.digests.take_collectives(), written]

    def intent_of_part(self, intent: Sequence[float]) -> list[float]:
        """Return the values that must be equal on all parts, in the order of `PART_COLUMNS`;
        different learning rates would make parameters that all parts hold differ."""
        return [*intent, *self.counts, digest(self._functions.hyperparameters())]


def _measured(tier: Tier | None) -> Tier:
    assert tier is not None, "a gradient without a sum of squares"
    return tier


INTENT_COLUMNS = ("the step count", "clip_grad_norm_", "the skips asked for")
COUNT_COLUMNS = ("the number of backwards",)
PART_COLUMNS = (*INTENT_COLUMNS, *COUNT_COLUMNS, "hyperparameters")
RANK_COLUMNS = (
    *PART_COLUMNS,
    "the collectives",
    "the weights loaded or written since the last step",
)
"""Names of the values that ranks compare before an update, for messages."""


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


def digest(value: object) -> float:
    return float(crc32(repr(value).encode()))


def check_rows_alike(rows: Tensor, each: str, what: Sequence[str], step_count: float) -> None:
    """Check that all have launched the same collectives and are about to do the same update.

    Args:
        rows: (ranks, n) fp64 on the host: the intent of each rank; `what` names its columns.

    Raises:
        RankError: naming the first row and column that differ from row 0.
    """
    for number, row in enumerate(rows):
        if not row.equal(rows[0]):
            differs = what[int((row != rows[0]).nonzero()[0, 0])]
            raise RankError(
                f"ranks disagree in step {int(step_count) + 1}: {differs} of {each} {number} and "
                f"of {each} 0 differ. Every rank must run the same model and schedule"
                + ("; only its batches differ" if each in ("rank", "copy") else "")
            )
