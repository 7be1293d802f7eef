"""A process that runs tests in forked children, with the slow imports done once.

Started by `run.py` in the root of a copy of the source tree. Reads jobs from stdin, one line of
JSON each, and answers with a line each. It imports no module of the copy itself: a child must
import the sources as they are when it starts.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

TIMED_OUT = "timed out"


def main() -> None:
    """The arguments are the modules to import once."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run pytest in a child; returns its exit code, or what ended it, and the seconds it took."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(job)
    end = began + job["limit_s"]
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code: int | str = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > end:
            code = TIMED_OUT
            break
        time.sleep(0.02)
    # The processes that its tests have started are in its group.
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if code == TIMED_OUT:
        os.waitpid(child, 0)
    return {"code": code, "seconds": time.monotonic() - began}


def _child(job: dict[str, Any]) -> None:
    code = 3
    try:
        os.setpgid(0, 0)
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["environment"])
        import pytest

        code = int(pytest.main(job["arguments"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
