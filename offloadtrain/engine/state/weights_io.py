"""The model's weights as whole tensors: read from the optimizer, and written past it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks.model_checks import ModelError
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.state import parameter_state as state
from offloadtrain.engine.state.load_weights import Given, adopt_loaded
from offloadtrain.engine.state.state_io import StateIO
from offloadtrain.engine.step_report import Phase


class WeightsIO(StateIO):
    """The part of `OffloadOptimizer` that exchanges weights with the model's users.

    Attributes:
        model: the model that it trains.
    """

    model: nn.Module
    _incoming: Given | None = None
    """Values that are being written into the model."""
    _written_before: frozenset[nn.Parameter] = frozenset()
    """Parameters written by others before the values of `_incoming` were."""

    def require_whole_weights(self) -> None:
        """Raises ModelError where parameters are mostly in shards (ZeRO stage 3)."""
        if not self.ranks.is_single and any(b.streamed for k in self._blocks for b in k.held):
            raise ModelError(
                f"the weights are in shards on {self.ranks.size} ranks (zero_stage = 3): a rank "
                "has no state dict of its own. On every rank, take "
                "dict(optimizer.full_weights()), or save a checkpoint"
            )

    @torch.no_grad()
    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, a copy of its working weights on the host), one block at a time.

        All ranks must exhaust it: each block is gathered in a collective.
        """
        # Mode "delayed" uploads the weights that it holds back.
        self.synchronize()
        done: set[nn.Parameter] = set()
        for block in self._blocks:
            # Compute waits for the block's load; the next block's runs beside the copies below.
            block.use()
            for slot in (slot for bucket in block.held for slot in bucket.slots):
                done.add(slot.param)
                # Blocking: the slot may go to another block when the generator goes on.
                yield slot.name, slot.local.data.to("cpu", copy=True)
        for name, param in self.model.named_parameters():
            if param not in done:
                yield name, param.detach().to("cpu", copy=True)

    @torch.no_grad()
    def master_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, a copy of its fp32 master weights on the host, in the parameter's
        shape), one at a time, in the order of `model.named_parameters()`.

        Frozen parameters have no master: they yield the weights that forward uses, widened to fp32;
        integers as they are. All ranks must exhaust it, and each receives whole tensors. No step
        may be taken meanwhile.

        Raises:
            EngineError: after close().
        """
        if self._engine.guard.phase is Phase.CLOSED:
            raise EngineError("master_weights() after close(), which gives their memory back")
        # This thread reads masters that Adam on the host lane may still write.
        self.synchronize()
        slot_of = {s.param: (b, s) for k in self._blocks for b in k.held for s in b.slots}
        for name, param in self.model.named_parameters():
            if param in slot_of:
                bucket, slot = slot_of[param]
                rule = self._rules[bucket.group]
                yield name, state.whole_master(bucket, slot, rule, bucket.sharers)
            elif param.is_floating_point():
                yield name, param.detach().to("cpu", torch.float32, copy=True)
            else:
                yield name, param.detach().to("cpu", copy=True)

    def adopt_written_weights(self) -> None:
        """Set the masters of the parameters that others wrote; moments stay.

        After `model.load_state_dict` they are the values that it was given, fp32 ones in full;
        16-bit ones that the model had already change nothing. Otherwise, and for parameters written
        before it, they are the parameters' values. Every rank must give the same ones, or the next
        step raises a RankError.

        Between backward and `step()`, the step updates the new masters by its gradient.

        Raises:
            ModelError: for values beyond the range of the working weights.
            UpdateError: between backward and `step()`, where Adam runs inside backward
                (`skip_nonfinite` off and no `clip_norm`).
        """
        # This thread writes masters, which Adam in flight still uses.
        self.synchronize()
        self._engine.program.before_masters_change()
        incoming = loaded = self._incoming
        self._incoming = None
        written, before = frozenset(self._seal.written()), self._written_before
        if incoming is not None and not incoming.new:
            incoming, written = None, before
        report = None if self.ranks.is_single else self._tell_written
        if adopt_loaded(self._slots(), written, incoming, self._rules, report):
            self._engine.emit()
        if report is not None:
            self._tell_untrained(written, loaded)
        self._seal.renew()

    def _tell_written(self, bucket: Bucket, slot: Slot, values: Tensor) -> None:
        """Each rank keeps its shard of what it was given: the next step compares the whole values,
        or the model would be pieced together from different ones."""
        if bucket.sharers is self.ranks:
            self._engine.functions.written(slot.name, values)

    def _tell_untrained(self, written: frozenset[nn.Parameter], incoming: Given | None) -> None:
        """Record the written frozen parameters and buffers, which every rank keeps in full: the
        next step compares them, or ranks would train with different models. Running statistics are
        each rank's own."""
        values = [(n, p) for n, p in self.model.named_parameters() if not p.requires_grad]
        changed = [(name, param.data) for name, param in values if param in written]
        if incoming is not None:
            statistics = {
                id(x) for m in self.model.modules() if _keeps_statistics(m) for x in m.buffers()
            }
            buffers = [(n, x) for n, x in self.model.named_buffers() if id(x) not in statistics]
            changed += [(name, buffer) for name, buffer in buffers if name in incoming.names]
        for name, value in changed:
            self._engine.functions.written(name, value)

    @torch.no_grad()
    def expect_weights(self, values: Mapping[str, Tensor]) -> None:
        """Values, by the model's own names, are about to be written into it; raises as
        `adopt_written_weights`."""
        self._engine.program.before_masters_change()
        self._incoming = Given(self.model, values)
        self._written_before = frozenset(self._seal.written())


def _keeps_statistics(module: nn.Module) -> bool:
    norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return norm and bool(module.track_running_stats)
