"""Tiers: the kinds of memory that the state of a bucket may lie in."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A kind of memory. The gradient and the state of a bucket lie in one, `state_tier`, and are
    updated where they lie."""

    DEVICE = "device"
    HOST = "host"
