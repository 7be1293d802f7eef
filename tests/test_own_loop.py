"""A person with a loop of their own: a script of plain torch, and the same script with its three
changed lines. The person who fine-tunes is in test_page_code.py (docs/fine_tune_8b.md), the person
who watches in tui/test_terminal.py and tui/test_web.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import offloadtrain as ot

pytestmark = pytest.mark.slow

STEPS, SAVED_AT, MICROBATCHES, CONTEXT = 12, 7, 2, 8
RULE = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Windows(Dataset[Tensor]):
    """Bytes of a text, in windows that do not overlap."""

    def __init__(self) -> None:
        text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
        self.windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + F.gelu(block(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batches(done: int) -> Iterator[Tensor]:
    """The batches after `done` steps."""
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Windows(), batch_size=8, shuffle=True, generator=generator)
    return islice(iter(loader), done * MICROBATCHES, None)


def warm_up_and_decay(step: int) -> float:
    return min((step + 1) / 4, 1.0) * (1.0 - step / (2 * STEPS))


def script(checkpoint: Path, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Train; `options`: those of `ot.offload`, none: the script before it was changed."""
    torch.manual_seed(resume)  # a resumed run begins with other weights, and loads its own
    model = Model()
    optimizer: Any
    if options:
        optimizer = ot.offload(
            model, ot.AdamW(**RULE), clip_norm=1.0, grad_accum_steps=MICROBATCHES, **options
        )
        average: Any = ot.EMA(optimizer, decay=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RULE)  # type: ignore[arg-type]
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay)
    start = 0
    if resume:
        saved = torch.load(checkpoint, weights_only=True)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    source, losses, validations = batches(start), [], []
    for step in range(start, STEPS):
        total = 0.0
        for batch in islice(source, MICROBATCHES):
            loss = loss_of(model, batch)
            total += loss.item()
            optimizer.backward(loss) if options else (loss / MICROBATCHES).backward()
        if not options:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update() if options else average.update_parameters(model)
        losses.append(total)
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                validations.append(loss_of(model, Windows().windows[:64]).item())
            model.train()
        if step + 1 == SAVED_AT and not resume:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": SAVED_AT, **states}, checkpoint)
    weights = dict(average.weights()) if options else dict(average.module.named_parameters())
    result = {
        "losses": losses,
        "validations": validations,
        "average": {name: weight.detach().clone() for name, weight in weights.items()},
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }
    if options:
        optimizer.close()
    return result


@pytest.mark.parametrize("working", ["device", "host"])
def test_three_changed_lines_train_the_same_and_resume_to_the_bit(
    tmp_path: Path, working: str
) -> None:
    options = {"device": "cpu", "precision": "fp32", "working": working}
    plain = script(tmp_path / "plain.pt")
    changed = script(tmp_path / "changed.pt", **options)
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]
    for name in ("losses", "validations", "average", "weights"):
        torch.testing.assert_close(changed[name], plain[name], rtol=1e-5, atol=1e-6)
    resumed = script(tmp_path / "changed.pt", resume=True, **options)
    assert resumed["losses"] == changed["losses"][SAVED_AT:]
    assert resumed["validations"] == changed["validations"][SAVED_AT // 3 :]
    for name in ("average", "weights"):
        assert all(torch.equal(value, changed[name][key]) for key, value in resumed[name].items())
