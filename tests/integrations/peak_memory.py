"""Anonymous host memory while a folder is loaded, in a process of its own.

    python -m tests.integrations.peak_memory FOLDER OPTIONS

prints, as JSON, bytes above what imports take: "peak" while loading and "end" after it, "held" by
the engine's own account, and "mapped", the most that pages of files took.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import torch
import transformers

import offloadtrain as ot
from offloadtrain.engine import offload  # noqa: F401  # imported before memory is measured
from offloadtrain.runtime.arena import Tier


def resident() -> tuple[int, int]:
    """Bytes of anonymous memory and of mapped files."""
    text = Path("/proc/self/status").read_text()
    anonymous, file = (re.search(rf"{key}:\s+(\d+) kB", text) for key in ("RssAnon", "RssFile"))
    assert anonymous is not None and file is not None
    return int(anonymous[1]) << 10, int(file[1]) << 10


def main(folder: str, options: str) -> None:
    transformers.logging.disable_progress_bar()
    # What the first use of anything costs is not the model's.
    tiny = Path(folder, "tiny")
    ot.from_pretrained(tiny, device="cpu", **json.loads(options))[1].close()
    before, done = resident(), threading.Event()
    most = list(before)

    def watch() -> None:
        while not done.wait(0.001):
            most[:] = map(max, most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, optimizer = ot.from_pretrained(folder, device="cpu", **json.loads(options))
    done.set()
    watcher.join()
    held = sum(optimizer.ledger.total(tier) for tier in (Tier.HOST, Tier.DEVICE))
    end, peak, mapped = resident()[0] - before[0], most[0] - before[0], most[1] - before[1]
    print(json.dumps({"peak": peak, "end": end, "held": held, "mapped": mapped}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
