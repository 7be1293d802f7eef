"""One block: where its working weights are now, and who still reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.runtime.lanes import Buffer, Lanes, Range, Span


class StaleGraphError(OffloadTrainError):
    """A backward pass over a graph that was built with weights that are gone."""


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Views made inside of a user's inference mode could not be trained with afterwards."""
    with torch.inference_mode(False), torch.no_grad():
        yield


_Views = list[tuple[nn.Parameter, Tensor]]
"""What parameters are views of. Made once: blocks come and go at every use."""


def _show(views: _Views) -> None:
    for param, view in views:
        param.data = view


class Source(Protocol):
    """What brings a block's weights to where compute reads them."""

    def use(self, block: Block) -> None: ...
    def unpacked(self, block: Block, clock: int) -> None: ...
    def pinned(self, block: Block) -> bool: ...


class Block:
    """The unit of residence: the parameters that one module's forward uses as one.

    Attributes:
        buckets: of what is trained.
        frozen: of what is not, where the block may be streamed: their weights come and go with it.
        repeated: one of several of its kind, and used one after the other: it can be streamed.
        streamed: its weights come to a slot of the device for their use.
        source: brings its weights to where compute reads them.
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
        self.streamed = False
        self.source: Source
        self.forwards = 0
        self.expected = sum(len(bucket.slots) for bucket in buckets)
        self.generation = 0
        self.clock = 0
        self._lanes = lanes
        self._live_handles = 0
        self._runs_again = False
        self._backward: Span | None = None
        self._placeholders: dict[Bucket, Tensor] = {}
        self._weights: dict[Buffer | None, tuple[Range, ...]] = {}
        self._views: dict[Buffer, _Views] = {}
        """Of a streamed block: memory of its first bucket in a slot → what parameters are then."""
        self._absent: _Views = []
        """What they are without a slot."""

    @property
    def quiet(self) -> bool:
        """No graph holds a saved view of the weights."""
        if self._live_handles:
            return False
        # A recompute that nothing has told of: its graph holds them until autograd has gone on.
        return not (self._runs_again and self.source.pinned(self))

    @property
    def held(self) -> tuple[Bucket, ...]:
        """All that a forward of the block reads."""
        return self.buckets + self.frozen

    @property
    def weights(self) -> tuple[Range, ...]:
        """All that a forward or a backward of it reads, where it is now."""
        memory = self.held[0].working if self.held else None
        if memory not in self._weights:
            self._weights[memory] = tuple(bucket.working.whole for bucket in self.held)
        return self._weights[memory]

    def use(self) -> None:
        """Compute is about to read the weights."""
        self.source.use(self)

    def enter_device(self) -> None:
        """A slot holds the weights, or is about to: compute waits for them in `use`."""
        memory = self.held[0].working  # all buckets of a block change their slot together
        if memory not in self._views:
            self._views[memory] = self._seen(lambda bucket, slot: slot.view(bucket.working.flat))
        _show(self._views[memory])

    def leave_device(self) -> None:
        """The slot goes to another block; the parameters are NaN until the next use."""
        self.end_backward()
        if not self._absent:
            self._absent = self._seen(
                lambda bucket, slot: self.placeholder(bucket).expand(slot.shape)
            )
        _show(self._absent)

    def expose_host_weights(self) -> None:
        """Of a streamed block without a slot: parameters are the host's copy until the next use."""
        _show(self._seen(lambda bucket, slot: slot.view(bucket.load_source.flat)))

    def _seen(self, view: Callable[[Bucket, Slot], Tensor]) -> _Views:
        with _ordinary_tensors():
            return [(slot.param, view(b, slot)) for b in self.held for slot in b.slots]

    def placeholder(self, bucket: Bucket) -> Tensor:
        """The NaN that stands for the weights of a bucket while they are not on the device."""
        if bucket not in self._placeholders:
            flat = bucket.working.flat
            nan = torch.full((), float("nan"), dtype=flat.dtype, device=flat.device)
            self._placeholders[bucket] = nan
        return self._placeholders[bucket]

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
        if self.streamed:
            self.source.unpacked(self, clock)
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
