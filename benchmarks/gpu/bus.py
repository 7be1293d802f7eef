"""Copies between host and device through the engine's own lanes and pinned arena."""

from __future__ import annotations

import statistics
from functools import partial

import torch

from offloadtrain.cli.bench.rounds import measure
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.lanes import Buffer, Lane, Lanes, copy, lanes_for
from offloadtrain.step.layout.buffers import BufferSpec

ROUNDS = 5


def rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """GB/s up, down, and both at once (what the two carry together); whether it was pinned: 1.0."""
    arena = Arena(Ledger(), pin=device.type == "cuda")
    asked = [BufferSpec("bus", nbytes, "uint8")] * 2
    host = [Buffer("host", flat) for flat in arena.map(asked)]
    there = [Buffer("device", torch.zeros(nbytes, dtype=torch.uint8, device=device)) for _ in host]
    lanes = lanes_for(device)
    up = partial(_launch, lanes, Lane.H2D, host[0], there[0])
    down = partial(_launch, lanes, Lane.D2H, there[1], host[1])
    cases = {"h2d": [up], "d2h": [down], "both": [up, down]}
    runs = {name: partial(_run, lanes, copies) for name, copies in cases.items()}
    seconds = measure(runs, ROUNDS, lambda number: None)
    pinned = float(arena.pinned)
    lanes.close()
    arena.close()
    return {
        name: len(cases[name]) * nbytes / statistics.median(times) / 1e9
        for name, times in seconds.items()
    } | {"pinned": pinned}


def _run(lanes: Lanes, copies: list[partial[None]]) -> None:
    for launch in copies:
        launch()
    lanes.synchronize()


def _launch(lanes: Lanes, lane: Lane, source: Buffer, target: Buffer) -> None:
    lanes.launch(lane, "bus", copy, [source.whole], [target.whole])
