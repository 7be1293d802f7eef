"""Anonymous host memory while a folder is loaded, in a process of its own.

    python -m tests.integrations.peak_memory FOLDER OPTIONS

prints, as JSON, bytes above what imports take: "peak" while loading and "end" after it, "held" by
the engine's own account, and "mapped", the most that pages of files took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

import offloadtrain as ot
from benchmarks.resident_memory import Watch, resident
from offloadtrain.engine import offload  # noqa: F401  # imported before memory is measured
from offloadtrain.step.layout.tiers import Tier


def main(folder: str, options: str) -> None:
    transformers.logging.disable_progress_bar()
    # What the first use of anything costs is not the model's.
    tiny = Path(folder, "tiny")
    ot.from_pretrained(tiny, device="cpu", **json.loads(options))[1].close()
    before = resident()
    with Watch() as watch:
        _, optimizer = ot.from_pretrained(folder, device="cpu", **json.loads(options))
    accounted = sum(optimizer.ledger.total(tier) for tier in (Tier.HOST, Tier.DEVICE))
    end, peak = resident()[0] - before[0], watch.peak_bytes - before[0]
    mapped = watch.mapped_bytes - before[1]
    print(json.dumps({"peak": peak, "end": end, "held": accounted, "mapped": mapped}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
