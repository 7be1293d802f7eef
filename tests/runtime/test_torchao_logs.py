"""Two messages of an import of torchao are dropped, and no others of these loggers."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.util import find_spec

import pytest

import offloadtrain.runtime  # noqa: F401  it drops them


def test_only_these_messages_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    for name, dropped in (
        ("torchao", "Failed to load /site-packages/torchao/_C_mxfp8.so: no library"),
        ("torch.utils._pytree", "%s is an Enum subclass and is now natively supported"),
    ):
        logger = logging.getLogger(name)
        logger.warning(dropped, *["K"] * dropped.count("%s"))
        assert caplog.messages == []
        shown = "Failed to load /site-packages/torchao/_C.abi3.so: no library"
        logger.warning("%s", shown)
        assert caplog.messages == [shown]
        caplog.clear()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="no torchao")
def test_an_import_of_torchao_is_silent() -> None:
    command = [sys.executable, "-c", "import offloadtrain.runtime, torchao.float8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
