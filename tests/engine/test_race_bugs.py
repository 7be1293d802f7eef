"""The prover on programs of a few lines: race bugs that other trainers shipped, and their cures.

Each class of bug is one that was reported against a published trainer or inference engine: bucket
buffers used in turn without a wait for the copy, one of several producers waited for, memory given
out again before a copy drained, an optimizer or a norm that reads before the gradient is there,
weights fetched before they are written, events recorded too early or on the wrong stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offloadtrain.runtime.lanes import Buffer, Lane, Lanes, SequentialLanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.proof.prove import prove


def buffers(*names: str) -> list[Buffer]:
    return [Buffer(name, torch.zeros(64)) for name in names]


def recorded(body: Callable[[Lanes], None]) -> set[str]:
    lanes = RecordingLanes(SequentialLanes())
    body(lanes)
    return {fault.kind for fault in prove(lanes.program)}


def touch(*_: torch.Tensor) -> None: ...


def copies(lanes: Lanes, lane: Lane, source: Buffer, target: Buffer) -> None:
    lanes.launch(lane, f"{source.name} to {target.name}", touch, [source.whole], [target.whole])


def test_two_lanes_that_share_a_bucket_need_an_event() -> None:
    """Reduction into one of two buckets while the other one's copy has not drained."""
    device, host = buffers("device", "host")

    def body(lanes: Lanes, ordered: bool) -> None:
        for _ in range(2):
            lanes.launch(Lane.COMPUTE, "reduce", touch, [], [device.whole])
            lanes.wait(Lane.D2H, lanes.record(Lane.COMPUTE), "reduced")
            copies(lanes, Lane.D2H, device, host)
            if ordered:
                lanes.wait(Lane.COMPUTE, lanes.record(Lane.D2H), "drained")

    assert recorded(lambda lanes: body(lanes, True)) == set()
    assert recorded(lambda lanes: body(lanes, False)) == {"race"}


def test_waiting_for_one_of_two_producers_is_not_enough() -> None:
    device, other, host = buffers("device", "other", "host")

    def body(lanes: Lanes, both: bool) -> None:
        lanes.launch(Lane.COMPUTE, "gradient", touch, [], [device.whole])
        copies(lanes, Lane.H2D, host, other)
        lanes.wait(Lane.D2H, lanes.record(Lane.COMPUTE), "one producer")
        if both:
            lanes.wait(Lane.D2H, lanes.record(Lane.H2D), "the other producer")
        lanes.launch(Lane.D2H, "both down", touch, [device.whole, other.whole], [])

    assert recorded(lambda lanes: body(lanes, True)) == set()
    assert recorded(lambda lanes: body(lanes, False)) == {"race"}


def test_the_optimizer_reads_before_the_copy_has_come() -> None:
    device, host, master = buffers("device", "host", "master")

    def body(lanes: Lanes, waits: bool) -> None:
        copies(lanes, Lane.D2H, device, host)
        if waits:
            lanes.wait(Lane.HOST, lanes.record(Lane.D2H), "gradients")
        copies(lanes, Lane.HOST, host, master)

    assert recorded(lambda lanes: body(lanes, True)) == set()
    assert recorded(lambda lanes: body(lanes, False)) == {"race"}


def test_an_event_recorded_too_early_orders_nothing() -> None:
    device, host = buffers("device", "host")

    def body(lanes: Lanes) -> None:
        early = lanes.record(Lane.COMPUTE)
        lanes.launch(Lane.COMPUTE, "gradient", touch, [], [device.whole])
        lanes.wait(Lane.D2H, early, "too early")
        copies(lanes, Lane.D2H, device, host)

    assert recorded(body) == {"race"}


def test_the_launching_thread_that_waits_orders_every_lane() -> None:
    device, host = buffers("device", "host")

    def body(lanes: Lanes) -> None:
        copies(lanes, Lane.D2H, device, host)
        lanes.host_wait(lanes.record(Lane.D2H), "the norm")
        copies(lanes, Lane.H2D, host, device)

    assert recorded(body) == set()


def test_weights_replaced_inside_of_a_span() -> None:
    weights, host = buffers("weights", "host")

    def body(lanes: Lanes, closes: bool) -> None:
        span = lanes.open_span("backward", [weights.whole])
        if closes:
            lanes.close_span(span)
            lanes.wait(Lane.H2D, lanes.record(Lane.COMPUTE), "backward is over")
        copies(lanes, Lane.H2D, host, weights)
        lanes.close_span(span)

    assert recorded(lambda lanes: body(lanes, True)) == set()
    assert recorded(lambda lanes: body(lanes, False)) == {"race"}


def test_reading_what_nobody_wrote_and_a_span_left_open() -> None:
    device, host = buffers("device", "host")

    def body(lanes: Lanes) -> None:
        lanes.alloc(device.whole, Lane.COMPUTE)
        copies(lanes, Lane.D2H, device, host)
        lanes.open_span("forever", [host.whole])

    assert recorded(body) >= {"uninitialised", "unclosed"}


def test_memory_reused_under_another_dtype_is_the_same_memory() -> None:
    memory = torch.zeros(64)
    wide, narrow = Buffer("wide", memory), Buffer("narrow", memory.view(torch.bfloat16))
    host = Buffer("host", torch.zeros(64))

    def body(lanes: Lanes) -> None:
        copies(lanes, Lane.D2H, wide, host)
        lanes.launch(Lane.COMPUTE, "gather", touch, [], [narrow.first(8)])

    assert recorded(body) == {"race"}


def both(body: Callable[[Lanes, bool], None]) -> None:
    """The cured program has no fault, the shipped one races."""
    assert recorded(lambda lanes: body(lanes, True)) == set()
    assert recorded(lambda lanes: body(lanes, False)) == {"race"}


def test_memory_given_out_again_before_its_copy_has_drained() -> None:
    """An allocator that knows compute only: the freed gradient's bytes become an activation."""
    memory = torch.zeros(64)
    gradient, activation = Buffer("gradient", memory), Buffer("activation", memory)
    (host,) = buffers("host")

    def body(lanes: Lanes, waits: bool) -> None:
        lanes.launch(Lane.COMPUTE, "backward", touch, [], [gradient.whole])
        lanes.wait(Lane.D2H, lanes.record(Lane.COMPUTE), "gradient")
        copies(lanes, Lane.D2H, gradient, host)
        if waits:
            lanes.wait(Lane.COMPUTE, lanes.record(Lane.D2H), "the copy has drained")
        lanes.launch(Lane.COMPUTE, "next block", touch, [], [activation.whole])

    both(body)


def test_weights_fetched_before_the_optimizer_has_written_them() -> None:
    host, device = buffers("host", "device")

    def body(lanes: Lanes, waits: bool) -> None:
        lanes.launch(Lane.HOST, "adam", touch, [], [host.whole])
        if waits:
            lanes.wait(Lane.LOAD, lanes.record(Lane.HOST), "adam")
        copies(lanes, Lane.LOAD, host, device)

    both(body)


def test_a_slot_given_to_the_next_block_while_backward_reads_it() -> None:
    slot, first, second = buffers("slot", "first", "second")

    def body(lanes: Lanes, waits: bool) -> None:
        copies(lanes, Lane.LOAD, first, slot)
        lanes.wait(Lane.COMPUTE, lanes.record(Lane.LOAD), "first is there")
        span = lanes.open_span("backward first", [slot.whole])
        lanes.close_span(span)
        if waits:
            lanes.wait(Lane.LOAD, lanes.record(Lane.COMPUTE), "backward of first")
        copies(lanes, Lane.LOAD, second, slot)

    both(body)


def test_compute_that_does_not_wait_for_its_weights() -> None:
    slot, host = buffers("slot", "host")

    def body(lanes: Lanes, waits: bool) -> None:
        copies(lanes, Lane.LOAD, host, slot)
        if waits:
            lanes.wait(Lane.COMPUTE, lanes.record(Lane.LOAD), "weights")
        lanes.close_span(lanes.open_span("forward", [slot.whole]))

    both(body)


def test_an_event_of_the_wrong_stream() -> None:
    """The gradient is reduced on a side stream, and the event is recorded on compute."""
    gradient, host = buffers("gradient", "host")

    def body(lanes: Lanes, right: bool) -> None:
        lanes.launch(Lane.H2D, "reduce on a side stream", touch, [], [gradient.whole])
        event = lanes.record(Lane.H2D if right else Lane.COMPUTE)
        lanes.wait(Lane.D2H, event, "reduced")
        copies(lanes, Lane.D2H, gradient, host)

    both(body)


def test_the_event_of_the_other_slot_of_a_ring() -> None:
    """Two staging slots; the third use waits for the use that came before the one it should."""
    ring, host = buffers("slot 0", "slot 1"), buffers("host 0", "host 1", "host 2")

    def body(lanes: Lanes, right: bool) -> None:
        copied = [lanes.record(Lane.D2H)]
        for number in range(3):
            if number == 2:
                lanes.wait(Lane.COMPUTE, copied[1 if right else 0], "the slot is free")
            lanes.launch(Lane.COMPUTE, "gather", touch, [], [ring[number % 2].whole])
            lanes.wait(Lane.D2H, lanes.record(Lane.COMPUTE), "gathered")
            copies(lanes, Lane.D2H, ring[number % 2], host[number])
            copied.append(lanes.record(Lane.D2H))

    both(body)


def test_a_norm_over_gradients_that_are_still_arriving() -> None:
    device, host, norm = buffers("device", "host", "norm")

    def body(lanes: Lanes, waits: bool) -> None:
        lanes.launch(Lane.HOST, "zero", touch, [], [host.whole])
        lanes.wait(Lane.D2H, lanes.record(Lane.HOST), "zeroed")
        copies(lanes, Lane.D2H, device, host)
        if waits:
            lanes.wait(Lane.HOST, lanes.record(Lane.D2H), "all gradients")
        copies(lanes, Lane.HOST, host, norm)

    both(body)


def test_the_next_gradient_over_weights_on_their_way_up() -> None:
    """Weights staged in the gradient's memory, which the next backward fills."""
    shared, gradient, weights = buffers("shared", "gradient", "weights")

    def body(lanes: Lanes, waits: bool) -> None:
        lanes.launch(Lane.HOST, "adam over the gradient", touch, [], [shared.whole])
        lanes.wait(Lane.H2D, lanes.record(Lane.HOST), "adam")
        copies(lanes, Lane.H2D, shared, weights)
        if waits:
            lanes.wait(Lane.D2H, lanes.record(Lane.H2D), "the upload has left")
        copies(lanes, Lane.D2H, gradient, shared)

    both(body)


def test_a_double_buffer_flipped_while_its_old_copy_is_read() -> None:
    """A checkpoint's copy of the state (on the d2h lane here) and the step after next."""
    a, b, file = buffers("copy a", "copy b", "file")

    def body(lanes: Lanes, waits: bool) -> None:
        copies(lanes, Lane.HOST, a, b)
        lanes.wait(Lane.D2H, lanes.record(Lane.HOST), "the state is written")
        copies(lanes, Lane.D2H, b, file)
        copies(lanes, Lane.HOST, b, a)
        if waits:
            lanes.wait(Lane.HOST, lanes.record(Lane.D2H), "the checkpoint has read it")
        copies(lanes, Lane.HOST, a, b)

    both(body)


def test_offloaded_memory_used_again_before_it_came_back() -> None:
    berth, first, second, device = buffers("berth", "first", "second", "device")

    def body(lanes: Lanes, waits: bool) -> None:
        copies(lanes, Lane.D2H, first, berth)
        lanes.wait(Lane.LOAD, lanes.record(Lane.D2H), "offloaded")
        copies(lanes, Lane.LOAD, berth, device)
        if waits:
            lanes.wait(Lane.D2H, lanes.record(Lane.LOAD), "it is back")
        copies(lanes, Lane.D2H, second, berth)

    both(body)
