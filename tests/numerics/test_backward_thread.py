"""Backward in a thread of its own, where that of a CUDA device runs: the same bits.

The hooks of gradients, saved tensors and modules, and the second forward of recompute, then run in
another thread than the forward, whose thread-local state they do not see.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.autograd import graph

from tests.numerics.comparison import compare

CASES: list[dict[str, Any]] = [
    {"working": "host", "activation": "offload", "recompute_blocks": 2, "accum": 2},
]
MORE: list[dict[str, Any]] = [
    {"activation": "offload_saved"},
    {},
    {"working": "host"},
    {"activation": "recompute"},
    {"update": "speculative", "working": "host"},
    {"update": "speculative", "activation": "recompute"},
]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Run each backward in another thread; yield the threads that one has run in. One inside of a
    backward (reentrant recompute) stays where it is."""
    run, used = graph._engine_run_backward, set[int]()
    with ThreadPoolExecutor(1) as pool:

        def elsewhere(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() in used:
                return run(*args, **kwargs)
            enabled = torch.is_grad_enabled()

            def task() -> Any:
                used.add(threading.get_ident())
                with torch.set_grad_enabled(enabled):
                    return run(*args, **kwargs)

            return pool.submit(task).result()

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", elsewhere)
        monkeypatch.setattr(graph, "_engine_run_backward", elsewhere)
        yield used


@pytest.mark.parametrize(
    "options",
    [*CASES, *(pytest.param(options, marks=pytest.mark.slow) for options in MORE)],
    ids=str,
)
@pytest.mark.parametrize("name", ["tied", pytest.param("reentrant", marks=pytest.mark.slow)])
def test_the_thread_of_backward_changes_no_bit(
    threads: set[int], name: str, options: dict[str, Any]
) -> None:
    compare(name, "bf16", clip=0.5, steps=3, **options)
    assert len(threads) == 1 and threading.get_ident() not in threads
