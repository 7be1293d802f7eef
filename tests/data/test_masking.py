"""Masked language modelling: which tokens are hidden, by what, and that everyone draws the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offloadtrain.config.sections import IGNORED
from offloadtrain.data.batches import CHOSEN, MASKED, RANDOM, Batch, Batches, Masking
from offloadtrain.data.tokens import DataError, TokenFile
from tests.data.test_batches import counting_file

MASKING = Masking(mask_token=1 << 20, vocab_size=1 << 20)
LENGTHS = [3, 40, 1, 77, 200, 8]


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    """Token i is i."""
    return counting_file(tmp_path / "a.bin", LENGTHS)


def batches_of(file: TokenFile, batch: int = 4, **options: Any) -> Batches:
    settings: dict[str, Any] = {
        "seq_len": 16,
        "packing": "isolated",
        "seed": 3,
        "masking": MASKING,
        **options,
    }
    return Batches(file, batch=batch, **settings)


def assert_equal(batch: Batch, expected: Batch) -> None:
    for x, wanted in zip(batch, expected, strict=True):
        assert x is not None and wanted is not None and torch.equal(x, wanted)


@pytest.mark.slow
def test_shares_are_those_of_bert() -> None:
    samples = np.arange(3000)
    tokens = np.broadcast_to(np.arange(512), (3000, 512))
    masking = Masking(mask_token=700, vocab_size=600)
    chosen, hidden = masking.chosen(1, samples, 512), masking.hidden(tokens, 1, samples)
    # 1.5M places: each share within 5 standard deviations of its own.
    for drawn, share, among in (
        (chosen, CHOSEN, chosen.size),
        (hidden[chosen] == 700, MASKED, chosen.sum()),
        ((hidden != 700)[chosen] & (hidden != tokens)[chosen], RANDOM, chosen.sum()),
    ):
        expected = share * (599 / 600 if share == RANDOM else 1)
        assert abs(drawn.mean() - expected) < 5 * (share * (1 - share) / among) ** 0.5
    random = hidden[(hidden != 700) & (hidden != tokens)]
    assert random.min() == 0 and random.max() == 599
    # By place as by sample: no column and no row is chosen much more often than another.
    assert np.abs(chosen.mean(0) - CHOSEN).max() < 6 * (CHOSEN * 0.85 / 3000) ** 0.5
    assert np.abs(chosen.mean(1) - CHOSEN).max() < 6 * (CHOSEN * 0.85 / 512) ** 0.5


def test_targets_are_the_hidden_tokens(file: TokenFile) -> None:
    plain, masked = batches_of(file, masking=None), batches_of(file)
    hidden = 0
    for _ in range(20):
        count = masked.counted(1)
        before, batch = plain.next(), masked.next()
        chosen_BT = batch.targets_BT != IGNORED
        assert count == int(chosen_BT.sum())
        assert torch.equal(batch.targets_BT[chosen_BT], before.tokens_BT[chosen_BT])
        assert torch.equal(batch.tokens_BT[~chosen_BT], before.tokens_BT[~chosen_BT])
        assert batch.positions_BT is not None and before.positions_BT is not None
        assert torch.equal(batch.positions_BT, before.positions_BT)
        hidden += int((batch.tokens_BT == MASKING.mask_token).sum())
    assert hidden > 50 and not masked.all_count


def test_ranks_and_resumed_runs_draw_the_same(file: TokenFile) -> None:
    alone = batches_of(file)
    expected = [alone.next() for _ in range(12)]
    ranks = [batches_of(file, batch=2, rank=rank, world=2) for rank in range(2)]
    for number, batch in enumerate(expected):
        if number == 5:  # from here on as a run that begins again, which gives another seed
            saved = ranks[0].state_dict()
            ranks = [batches_of(file, batch=2, rank=rank, world=2, seed=9) for rank in range(2)]
            for batches in ranks:
                batches.load_state_dict(saved)
        assert (
            ranks[0].counted(1) == ranks[1].counted(1) == int((batch.targets_BT != IGNORED).sum())
        )
        parts = [batches.next() for batches in ranks]
        columns = zip(*parts, strict=True)
        assert_equal(batch, Batch(*(torch.stack(rows, 1).flatten(0, 1) for rows in columns)))


def test_the_draws_never_change_and_differ_by_epoch(file: TokenFile) -> None:
    """Resumed runs rely on it."""
    batches = batches_of(file, shuffle=False, packing="stream")
    chosen, later = (batches.at(at).targets_BT != IGNORED for at in (0, batches.windows))
    assert not torch.equal(chosen, later)
    targets_BT = batches_of(file, batch=3, packing="stream").next().targets_BT
    assert targets_BT[targets_BT != IGNORED].tolist() == GOLDEN_TARGETS


GOLDEN_TARGETS = [120, 122, 123, 274, 283, 286, 41, 42]


def test_tokens_outside_the_mask_of_the_file_are_not_hidden(tmp_path: Path) -> None:
    mask = [int(token % 3 > 0) for token in range(sum(LENGTHS))]
    batches = batches_of(counting_file(tmp_path / "a.bin", LENGTHS, mask))
    targets = torch.cat([batches.next().targets_BT for _ in range(20)])
    chosen = targets[targets != IGNORED]
    assert len(chosen) > 50 and bool((chosen % 3 > 0).all())


def test_impossible_settings_are_refused(file: TokenFile) -> None:
    with pytest.raises(ValueError, match="mask_token = 9 is one of the 10 tokens"):
        Masking(mask_token=9, vocab_size=10)
    with pytest.raises(ValueError, match="what pads would be seen"):
        batches_of(file, packing="padded")
    with pytest.raises(DataError, match=r"saved for masked 0.15, .*, but this run has tokens"):
        batches_of(file, masking=None).load_state_dict(batches_of(file).state_dict())
