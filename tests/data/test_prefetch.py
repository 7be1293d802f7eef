"""A batch made ahead: the same batches in the same order, wherever they are told to go on."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest
import torch

from offloadtrain.data.batches import Batch, Batches, Prefetch
from offloadtrain.data.tokens import TokenFile
from tests.data.test_batches import counting_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return counting_file(tmp_path_factory.mktemp("tokens") / "a.bin", [1003])


def of(file: TokenFile) -> Batches:
    return Batches(file, batch=3, seq_len=7, seed=1, rank=1, world=2)


def test_the_batches_are_those_of_a_plain_run(file: TokenFile) -> None:
    """Also where they are skipped, and go back to a saved position; what is saved does not count
    the one ahead."""
    plain, prefetched = of(file), of(file)
    saved: dict[str, Any] = {}
    with closing(Prefetch(prefetched, lambda batch: batch)) as prefetch:
        for call in range(60):
            if call == 20:
                saved = plain.state_dict()
            if call == 30:
                for batches in (plain, prefetched):
                    batches.skip(2)
            if call == 40:
                for batches in (plain, prefetched):
                    batches.load_state_dict(saved)
            assert all(map(torch.equal, prefetch.next()[:2], plain.next()[:2]))
            assert prefetched.state_dict() == plain.state_dict()


def test_one_is_made_ahead_on_another_thread(file: TokenFile) -> None:
    made: list[int] = []
    second = threading.Event()

    def ready(batch: Batch) -> Batch:
        made.append(threading.get_ident())
        if len(made) == 2:
            second.set()
        return batch

    with closing(Prefetch(of(file), ready)) as prefetch:
        prefetch.next()
        assert second.wait(120)
        assert made[0] == threading.get_ident() != made[1]
        prefetch.next()
    assert len(made) == 3


def test_its_errors_are_raised_where_the_batch_is_taken(file: TokenFile) -> None:
    def ready(batch: Batch) -> Batch:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("planted")
        return batch

    batches = of(file)
    with closing(Prefetch(batches, ready)) as prefetch:
        prefetch.next()
        position = batches.position
        with pytest.raises(OSError, match="planted"):
            prefetch.next()
    assert batches.position == position
