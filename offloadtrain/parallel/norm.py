"""The norm of a model that is divided among ranks.

[Note: One norm of a divided model]
A pipeline's stages hold different parameters of one model, so no stage knows the norm. Each stage
measures the squares of its own parameters, summed over its data-parallel ranks and over the ranks
that hold the other parts of its matrices. The stages exchange these sums, and every stage adds all
of them: stage by stage, parameter by parameter, in fp64. A single process adds them in this order,
so the norm, the clip coefficient and the decision to skip equal its own, bit for bit. A process
with several stages exchanges once: the first of its stages to send measures all, and the others
take its result.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from offloadtrain.engine.division import Measured, NormMember
from offloadtrain.engine.norm import (
    COUNT_COLUMNS,
    INTENT_COLUMNS,
    PART_COLUMNS,
    RANK_COLUMNS,
    check_rows_alike,
    digest,
)
from offloadtrain.parallel.checks import check_same_gradients
from offloadtrain.runtime.process_group import ALONE, RankError, Ranks

_AGREEMENT = "the agreement among the ranks"
"""Column of an exchange: 1.0 if the sender's own group agrees, so that all ranks raise together."""


class DividedNorm:
    """Norm of a model of which this process holds one engine for each of its stages.

    Process r of p holds stages r, r + p, r + 2p and so on, in this order.
    """

    def __init__(self, ranks: Ranks, parts: Ranks = ALONE) -> None:
        """
        Args:
            ranks: processes of the pipeline, in the order of their first stages.
            parts: ranks that hold the other parts of this process's DTensors.
        """
        self.ranks, self._parts = ranks, parts
        # Weak references: an optimizer that is dropped without close() must end at once.
        self._members: list[weakref.ref[NormMember]] = []
        self._names: list[list[str]] = []
        self._measured: dict[NormMember, Measured] = {}
        self._sent_intent: Sequence[float] = ()
        """The intent of the last exchange."""

    def join(self, member: NormMember) -> None:
        """Add the engine of this process's next stage."""
        self._members.append(weakref.ref(member))

    def send(self, member: NormMember, intent: Sequence[float]) -> Callable[[], Measured]:
        """Send the squares of this process's parameters to the other stages; the first call of a
        step begins a collective.

        Args:
            intent: values that must be equal on every process, see `engine.norm.NormMeasure.send`.

        Returns:
            A function that waits for the other stages and returns the squares of all stages. It
            raises RankError if they disagree about the step.
        """
        if self.ranks.is_single and len(self._members) == 1:
            result = self._measure(member, intent)
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
        """Exchange the names of all stages' parameters, once: before the first squares. A pipeline
        without flushes calls it at its creation, since all stages wait for the last one here.

        Raises:
            RankError: a parameter is in two stages, or processes have different numbers of stages.
        """
        if self._names:
            return
        of_processes = self.ranks.gather([member.names for member in self._alive()])
        if len({len(stage_names) for stage_names in of_processes}) > 1:
            counts = ", ".join(str(len(stage_names)) for stage_names in of_processes)
            raise RankError(f"the processes of a pipeline hold {counts} stages: give each as many")
        # Reorder from processes to the order of the model.
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

    def _alive(self) -> list[NormMember]:
        return [member for ref in self._members if (member := ref()) is not None]

    def _exchange(self, intent: Sequence[float]) -> Callable[[], None]:
        members = self._alive()
        measurements = [self._measure(member, intent) for member in members]
        rows = [
            [*member.counts, *measured.of_parameter]
            for member, measured in zip(members, measurements, strict=True)
        ]
        self.agree_on_names()
        longest = len(members[0].counts) + max(map(len, self._names))
        padded = [row + [0.0] * (longest - len(row)) for row in rows]
        sent = self.ranks.send_host([*intent, *(x for row in padded for x in row)])

        def receive() -> None:
            # Waits for every stage's squares; the backward of the first stage ends last.
            self._add_up(sent(), members, measurements, intent)

        return receive

    def _add_up(
        self,
        rows: Tensor,
        members: Sequence[NormMember],
        measurements: Sequence[Measured],
        intent: Sequence[float],
    ) -> None:
        """Store the squares that all stages have sent, (processes, n)."""
        check_rows_alike(rows[:, : len(intent)], "stage", INTENT_COLUMNS, intent[0])
        of_stages = rows[:, len(intent) :].reshape(self.ranks.size, len(members), -1)
        # The first stage of every process, then the second stage of every process: model order.
        of_stages = of_stages.transpose(0, 1).flatten(0, 1)
        count = len(members[0].counts)
        check_rows_alike(of_stages[:, :count], "stage", COUNT_COLUMNS, intent[0])
        squares = [
            row[count : count + len(names)].tolist()
            for row, names in zip(of_stages, self._names, strict=True)
        ]
        all_squares = [value for of_stage in squares for value in of_stage]
        # Non-finite parameter → ranks whose shards contain it; known only for this process's
        # stages.
        known = {
            name: ranks for measured in measurements for name, ranks in measured.nonfinite.items()
        }
        pairs = zip(self._names, squares, strict=True)
        named = [pair for names, row in pairs for pair in zip(names, row, strict=True)]
        nonfinite = {name: known.get(name, ()) for name, value in named if not math.isfinite(value)}
        for member, measured in zip(members, measurements, strict=True):
            self._measured[member] = Measured(all_squares, nonfinite, measured.intents)

    def compare(self, member: NormMember, intent: Sequence[float]) -> None:
        """Compare the values that may have changed on the other parts since the norm was measured.

        Raises:
            RankError: the parts disagree about the step.
        """
        if not self._parts.is_single:
            rows = self._parts.all_gather_host(member.intent_of_part(intent))
            check_rows_alike(rows, "part", PART_COLUMNS, intent[0])

    def _measure(self, member: NormMember, intent: Sequence[float]) -> Measured:
        """Measure an engine's parameters, together with ranks that hold copies or other parts of
        them."""
        measured = member.measure_local(intent)
        copies = member.ranks.copies
        if not copies.is_single:
            # The ranks with copies of this shard, one in each group, must have the same gradient
            # and make the same decision; see [Note: Copies] in `runtime.process_group`.
            intent_sent = measured.intents[member.ranks.rank].tolist()
            rows = copies.all_gather_host(
                [*intent_sent, digest(measured.of_parameter), _agree(measured.intents)]
            )
            member.check_ranks(member.ranks, measured.intents, intent[0])
            columns = (*RANK_COLUMNS, "the sums of squares", _AGREEMENT)
            check_rows_alike(rows, "copy", columns, intent[0])
        return measured if self._parts.is_single else self._of_all_parts(member, measured, intent)

    def _of_all_parts(
        self, member: NormMember, measured: Measured, intent: Sequence[float]
    ) -> Measured:
        """Add the squares of the other parts of DTensors, in rank order. A tensor that every rank
        holds in full counts once, with the first rank's value."""
        same = [*member.intent_of_part(intent), _agree(measured.intents)]
        # Waits until the other ranks have finished this backward.
        rows = self._parts.all_gather_host([*same, *measured.of_parameter])
        num_same, divided = len(same), member.divided
        # Raises only after the exchange, because the other parts wait in it.
        member.check_ranks(member.ranks, measured.intents, intent[0])
        check_rows_alike(rows[:, :num_same], "part", (*PART_COLUMNS, _AGREEMENT), intent[0])
        check_same_gradients(member.names, rows[:, num_same:], divided, int(intent[0]))
        sums, nonfinite = [], dict(measured.nonfinite)
        for index, values in enumerate(rows[:, num_same:].T.tolist()):
            # If one part has an overflow, all parts skip the step.
            once = index not in divided and all(map(math.isfinite, values))
            total = 0.0
            for value in values[:1] if once else values:
                total += value
            if not math.isfinite(total):
                nonfinite.setdefault(member.names[index], ())
            sums.append(total)
        return Measured(sums, nonfinite, measured.intents)


def _agree(rows: Tensor) -> float:
    """Return 1.0 if all rows are equal, otherwise 0.0; ranks exchange it as a column."""
    return float(rows.eq(rows[:1]).all())
