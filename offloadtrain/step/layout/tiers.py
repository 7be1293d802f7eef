"""Tiers: the kinds of memory that the state of a bucket may lie in."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A kind of memory. The state of a bucket lies in one, `state_tier`. Its gradient lies where
    the state is updated, `update_tier`: state on the disk comes to the host for it."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
