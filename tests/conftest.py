"""One torch thread everywhere: small shapes gain nothing, and bits depend on the count."""

from __future__ import annotations

import os

# cuBLAS reads it once in a process, at its first product, and only with it repeats its bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what tests train is built, never fetched

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_memory_of_earlier_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor of the user's own token files: what was verified is remembered for this session."""
    os.environ["OFFLOADTRAIN_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU say so where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
