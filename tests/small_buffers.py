"""What `doctor` and `bench` measure, on buffers that take no time: for tests of what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offloadtrain.cli.bench import step
from offloadtrain.cli.doctor import measure
from offloadtrain.config import model_shape


def small_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of what fits into a cache are rates of the cache: nothing is to be concluded."""
    monkeypatch.setattr(measure, "PARAMS", {"cpu": 1 << 20, "cuda": 1 << 20})
    monkeypatch.setattr(measure, "QUICK_PARAMS", 1 << 20)
    monkeypatch.setattr(measure, "cache_bytes", lambda: 0)
    monkeypatch.setattr(measure, "COPY_BYTES", {"cpu": 4 << 20, "cuda": 4 << 20})
    monkeypatch.setattr(measure, "WIDTHS", {"cpu": (64, 128), "cuda": (64, 128)})
    monkeypatch.setattr(measure, "TOKENS", {"cpu": 16, "cuda": 16})
    monkeypatch.setattr(measure, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "CHECKPOINT_BYTES", 4 << 20)
    monkeypatch.setattr(measure, "STATE_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "BATCH_S", 0.0)
    monkeypatch.setattr(measure, "QUICK_BATCH_S", 0.0)


def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model in a hundredth of its size."""
    demo = replace(model_shape.SIZES["demo"], num_layers=2, d_model=32, num_heads=2)
    monkeypatch.setattr(step, "SIZES", {"demo": demo})
