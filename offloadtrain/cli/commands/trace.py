"""`offloadtrain trace`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from offloadtrain.boundary.safe_write import replace_file
from offloadtrain.config.errors import OffloadTrainError


def trace(run: Path, out: Path | None = None) -> None:
    """Write the timeline of each lane in the sampled steps as a Chrome trace.

    Parameters
    ----------
    run
        A run folder.
    out
        The file to write. Default: trace.json in the run folder.
    """
    from offloadtrain.events.chrome_trace import chrome_trace, read_run

    target = out or run / "trace.json"
    text = json.dumps(chrome_trace(read_run(run)))
    try:
        replace_file(target, text)
    except OSError as error:
        raise OffloadTrainError(f"{target} cannot be written: {error.strerror}") from error
    print(target)
    print("open it in https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
