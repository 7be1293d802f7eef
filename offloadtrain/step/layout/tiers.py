"""Tiers: the kinds of memory of a bucket's state."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A kind of memory. The state of a bucket is in `state_tier`. Its gradient is in the tier of
    the update, `update_tier`: state on the disk is updated on the host."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
