"""One block: where its working weights are now, and who still reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor, nn

from offloadtrain.engine.bucket import Bucket
from offloadtrain.errors import OffloadTrainError
from offloadtrain.transfer import Event, Lane, Lanes, Range, Span


class StaleGraphError(OffloadTrainError):
    """A backward pass over a graph that was built with weights that are gone."""


class Residence(Enum):
    """What is in memory for a block's working weights."""

    HOST = auto()
    """Only the host holds them; the parameters are NaN."""
    DEVICE = auto()
    """The device holds the newest weights; compute may read them."""
    UPLOADING = auto()
    """An upload is in flight; compute waits for its event before it reads."""


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Views made inside of a user's inference mode could not be trained with afterwards."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Source(Protocol):
    """What gives a streamed block its place on the device."""

    def use(self, block: Block) -> None: ...
    def unpacked(self, block: Block, clock: int) -> None: ...
    def evict(self, block: Block) -> None: ...
    def pinned(self, block: Block) -> bool: ...


class Block:
    """The unit of residence: the parameters that one module's forward uses as one.

    Attributes:
        buckets: of what is trained.
        frozen: of what is not, where the block may be streamed: their weights come and go with it.
        repeated: one of several of its kind, and used one after the other: it can be streamed.
        streamer: where its weights live on the host; None: they stay on the device.
        forwards: forwards of it that are running.
        generation: how many times the weights were replaced. A saved handle with another generation
            belongs to an older graph.
        clock: when its last forward outside of a backward began, in forwards of modules.
        expected: number of trainable parameters, each of which delivers a gradient per backward.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        buckets: tuple[Bucket, ...],
        lanes: Lanes,
        *,
        frozen: tuple[Bucket, ...] = (),
        repeated: bool = False,
    ) -> None:
        self.name = name or "root"
        self.module = module
        self.buckets = buckets
        self.frozen = frozen
        self.repeated = repeated
        self.streamer: Source | None = None
        self.forwards = 0
        self.expected = sum(len(bucket.slots) for bucket in buckets)
        self.generation = 0
        self.clock = 0
        self.residence = Residence.DEVICE
        self._lanes = lanes
        self._uploaded: Event | None = None
        self._live_handles = 0
        self._runs_again = False
        self._backward: Span | None = None
        self._placeholders: dict[Bucket, Tensor] = {}

    @property
    def quiet(self) -> bool:
        """No graph holds a saved view of the weights."""
        if self._live_handles:
            return False
        # A recompute that nothing has told of: its graph holds them until autograd has gone on.
        streamer = self.streamer if self._runs_again else None
        return streamer is None or not streamer.pinned(self)

    @property
    def held(self) -> tuple[Bucket, ...]:
        """All that a forward of the block reads."""
        return self.buckets + self.frozen

    @property
    def weights(self) -> list[Range]:
        return [bucket.working.whole for bucket in self.held]

    def launched_upload(self, event: Event) -> None:
        """DEVICE → UPLOADING: the weights change; graphs built before are stale."""
        self.generation += 1
        self._uploaded = event
        self.residence = Residence.UPLOADING

    def replaced(self) -> None:
        """→ HOST: the host's copy of a streamed block's weights changes."""
        self.generation += 1
        if self.streamer is not None:
            self.streamer.evict(self)

    def use(self) -> None:
        """→ DEVICE: compute is about to read the weights."""
        if self.streamer is not None:
            self.streamer.use(self)
        else:
            self.wait_uploaded(Lane.COMPUTE)

    def entered_device(self, event: Event) -> None:
        """HOST → UPLOADING: a slot holds the weights after `event`."""
        with _ordinary_tensors():
            for bucket in self.held:
                for slot in bucket.slots:
                    slot.param.data = slot.view(bucket.working.flat)
        self._uploaded = event
        self.residence = Residence.UPLOADING

    def left_device(self) -> None:
        """→ HOST: the slot goes to another block."""
        self.end_backward()
        with _ordinary_tensors():
            for bucket in self.held:
                for slot in bucket.slots:
                    slot.param.data = self.placeholder(bucket).expand(slot.shape)
        self._uploaded = None
        self.residence = Residence.HOST

    def lay_open(self) -> None:
        """Of a streamed block without a slot: parameters are the host's copy until the next use."""
        with _ordinary_tensors():
            for bucket in self.held:
                for slot in bucket.slots:
                    slot.param.data = slot.view(bucket.visible.flat)
        self.residence = Residence.HOST

    def placeholder(self, bucket: Bucket) -> Tensor:
        """The NaN that stands for the weights of a bucket while they are not on the device."""
        if bucket not in self._placeholders:
            flat = bucket.working.flat
            nan = torch.full((), float("nan"), dtype=flat.dtype, device=flat.device)
            self._placeholders[bucket] = nan
        return self._placeholders[bucket]

    def wait_uploaded(self, lane: Lane) -> None:
        """UPLOADING → DEVICE, seen from `lane`; what it runs next may read the new weights."""
        if self._uploaded is not None:
            self._lanes.wait(lane, self._uploaded, f"upload of {self.name}")
        if lane is Lane.COMPUTE:
            self._uploaded = None
            self.residence = Residence.DEVICE

    # [Note: Backward spans]
    # Autograd reads a block's weights from the first unpacking of a saved handle until the last
    # handle dies with its graph node. That interval is the block's backward span.

    def packed(self) -> None:
        self._live_handles += 1

    def unpacked(self, generation: int, clock: int) -> None:
        """A node of the graph is about to read the weights.

        Args:
            generation: of the weights when the graph was built.
            clock: when that was, in forwards of modules.

        Raises:
            StaleGraphError: if they were replaced since the graph was built.
        """
        if generation != self.generation:
            raise StaleGraphError(
                f"backward reached block '{self.name}' through a graph that was built before the "
                f"last optimizer step ({self.generation - generation} update(s) ago): its weights "
                "are gone. Run forward again after step()."
            )
        if self.streamer is not None:
            self.streamer.unpacked(self, clock)
        if self._backward is None:
            self._backward = self._lanes.open_span(f"backward {self.name}", self.weights)

    def runs_again(self) -> None:
        """A forward of it runs as a part of a backward, and nothing was unpacked that told so."""
        self._runs_again = True
        self.unpacked(self.generation, self.clock)

    def released(self) -> None:
        self._live_handles -= 1
        if self._live_handles == 0:
            self.end_backward()

    def end_backward(self) -> None:
        if self._backward is not None:
            self._lanes.close_span(self._backward)
            self._backward = None
