"""Decides which buckets have gradient and state on the device, or only sums of microbatches, and
which have state on the disk.

[Note: State where there is room]
When the norm is known, the device is idle until the first block has its new weights, and
the host has all of Adam to do. So the first buckets of the forward stay on the device: they are
updated there at once, and the next forward runs over them while the host updates the later ones.
No update is stale. A bucket whose weights are streamed from the host or the disk has no state on
the device, since loads read what the host's update has written.

Among the buckets that the host updates, those on the disk are spread evenly: the host updates a
bucket whose state it has while the next one is read.

[Note: Sums where there is room]
Sums of microbatches are on the device for a share of the buckets. Gradients that the host adds pass
through a few staging slots during backward, and compute waits for a free slot. So embedding and
head come first: they are several times as large as staging, with little concurrent compute. The
rest of the share is spread evenly over the layers, so that the bus and the host copy and add one
while the device computes the next ones. The choice does not depend on the tier of the
state: state on the device includes its sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from offloadtrain.config.errors import DeviceMemoryError
from offloadtrain.config.offload import OffloadConfig, OptionError
from offloadtrain.config.units import format_bytes
from offloadtrain.step.layout.block_spec import BlockSpec, BucketSpec
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier

SHARES = 10_000
"""A plan rounds shares down to a multiple of 1 / SHARES."""

DeviceBytes = Callable[[StepSpec], int]
"""Returns the bytes of a spec on one device."""


def with_state_tiers(spec: StepSpec, device_bytes: DeviceBytes) -> StepSpec:
    """Set the tier of every trained bucket's state according to the config.

    Raises:
        OptionError: a share this large cannot be on the device.
        DeviceMemoryError: the share exceeds `device_memory_limit`.
    """
    limit = spec.config.memory.device_limit
    if spec.config.state.tier == "auto":
        # Without a limit the free memory of the device is not known yet.
        return first_on_device(spec, 0) if limit is None else filled(spec, limit, device_bytes)
    tiered = _spread_on_disk(first_on_device(spec, _device_count(spec)))
    if limit is not None and tiered.has_state_on(Tier.DEVICE):
        needed = device_bytes(tiered)
        if needed > limit:
            raise DeviceMemoryError(
                f"device_memory_limit is {format_bytes(limit)}, and the engine needs "
                f"{format_bytes(needed)} with {device_share(tiered):g} of the state on the device: "
                "raise it, or lower state_on"
            )
    return tiered


def with_sum_tiers(blocks: Sequence[BlockSpec], config: OffloadConfig) -> tuple[BlockSpec, ...]:
    """Choose the buckets whose microbatches are summed on the device, if their state is on the
    host."""
    buckets = [bucket for block in blocks for bucket in block.buckets]
    layers = [bucket for block in blocks if block.repeated for bucket in block.buckets]
    outside = [bucket for block in blocks if not block.repeated for bucket in block.buckets]
    outside.sort(key=lambda bucket: -bucket.numel)
    wanted = config.gradients.device_share * sum(bucket.numel for bucket in buckets)
    first = outside[: _count_within([bucket.numel for bucket in outside], wanted)]
    wanted -= sum(bucket.numel for bucket in first)
    chosen = {bucket.name for bucket in first}
    chosen |= _spread(layers, max(wanted, 0) / max(sum(bucket.numel for bucket in layers), 1))

    def placed(bucket: BucketSpec) -> BucketSpec:
        return replace(bucket, sums_on_device=bucket.name in chosen)

    return tuple(replace(block, buckets=tuple(map(placed, block.buckets))) for block in blocks)


def sums_bytes(spec: StepSpec, share: float) -> int:
    """Return the bytes on the device for this share of the sums of microbatches."""
    blocks = with_sum_tiers(spec.blocks, spec.config.replace(sums_on={"device": share}))
    spread = replace(spec, blocks=blocks)
    summed = filter(spread.sums_on_device, spread.buckets)
    return sum(ITEMSIZE["float32"] * bucket.shard_numel for bucket in summed)


def sums_share(spec: StepSpec) -> float:
    """Return the share of the sums of microbatches that is on the device, among those that the
    host's updates read."""
    on_host = spec.buckets_on(Tier.HOST)
    summed = sum(bucket.numel for bucket in on_host if spec.sums_on_device(bucket))
    return summed / max(sum(bucket.numel for bucket in on_host), 1)


def _spread(buckets: Sequence[BucketSpec], share: float) -> set[str]:
    """Choose buckets with a share of the elements, spread as evenly as their sizes allow."""
    chosen, wanted, placed = set(), 0.0, 0
    for bucket in buckets:
        wanted += share * bucket.numel
        if share and placed + bucket.numel / 2 <= wanted:
            chosen.add(bucket.name)
            placed += bucket.numel
    return chosen


def candidates(spec: StepSpec) -> list[BucketSpec]:
    """Return the buckets that may have their state on the device, in the order of use."""
    streamed_past_host = spec.config.weights.offloaded
    return [
        bucket for bucket in spec.buckets if not (streamed_past_host and spec.is_streamed(bucket))
    ]


def first_on_device(spec: StepSpec, count: int) -> StepSpec:
    """Put the state of the first `count` candidates on the device, all other state on the host."""
    chosen = {bucket.name for bucket in candidates(spec)[:count]}

    return _tiered(spec, lambda bucket: Tier.DEVICE if bucket.name in chosen else Tier.HOST)


def _tiered(spec: StepSpec, tier_of: Callable[[BucketSpec], Tier]) -> StepSpec:
    def placed(bucket: BucketSpec) -> BucketSpec:
        tier = tier_of(bucket)
        with_it = tier is Tier.DISK and spec.config.gradients.tier == "disk"
        if (bucket.state_tier, bucket.gradient_on_disk) == (tier, with_it):
            return bucket
        return replace(bucket, state_tier=tier, gradient_on_disk=with_it)

    blocks = (replace(block, buckets=tuple(map(placed, block.buckets))) for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


def filled(spec: StepSpec, limit: int, device_bytes: DeviceBytes) -> StepSpec:
    """Put as many buckets on the device as fit the limit together with all other buffers; none if
    the other buffers alone exceed it."""
    counts = range(1, len(candidates(spec)) + 1)
    # Each additional bucket takes more memory of the device.
    count = bisect_right(counts, limit, key=lambda n: device_bytes(first_on_device(spec, n)))
    return first_on_device(spec, count)


def may_be_on_device(config: OffloadConfig) -> bool:
    """Return True if some state is on the device, now or after a later step."""
    return config.state.device_share > 0 or config.state.tier == "auto"


def device_share(spec: StepSpec) -> float:
    """Return the share that gives the spec's tiers, rounded down to the resolution of a job."""
    total = sum(bucket.numel for bucket in spec.buckets)
    on_device = sum(bucket.numel for bucket in spec.buckets_on(Tier.DEVICE))
    return SHARES * on_device // total / SHARES


def _spread_on_disk(spec: StepSpec) -> StepSpec:
    """Put the share of the config on the disk, choosing among buckets on the host."""
    of_host = spec.buckets_on(Tier.HOST)
    total, host_total = (sum(b.numel for b in some) for some in (spec.buckets, of_host))
    share = min(spec.config.state.disk_share * total / max(host_total, 1), 1.0)
    chosen = _spread(of_host, share)
    return _tiered(
        spec, lambda candidate: Tier.DISK if candidate.name in chosen else candidate.state_tier
    )


def _device_count(spec: StepSpec) -> int:
    """Return the number of candidates whose middle is within the share.

    Raises:
        OptionError: all candidates together are less than the share.
    """
    share = spec.config.state.device_share
    sizes = [bucket.numel for bucket in candidates(spec)]
    total = sum(bucket.numel for bucket in spec.buckets)
    largest = max(sizes, default=0)
    if share * total > sum(sizes) + largest / 2:
        raise OptionError(
            f"state_on asks for {share:g} of the state on the device, and only "
            f"{sum(sizes) / total:.2f} of it are of blocks whose weights stay there: lower the "
            "share, or raise resident_blocks"
        )
    return _count_within(sizes, share * total)


def _count_within(sizes: Sequence[int], total: float) -> int:
    """Return the number of first buckets whose middle is within `total` elements."""
    ends = accumulate(sizes)
    return sum(end - size / 2 <= total for end, size in zip(ends, sizes, strict=True))
