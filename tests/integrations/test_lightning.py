"""Lightning's Trainer over an offloaded module: the same losses and norms, in 4 decimals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.frameworks import data, with_lightning
from benchmarks.frameworks.accelerated import BATCH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # advice on workers, on batches, on its use of torch
]
STREAMED = {"working": "host"}


def loader() -> Any:
    return torch.utils.data.DataLoader(data.Texts(), batch_size=BATCH)


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 5, "max_steps": -1, "max_epochs": 2},
        {"gradient_clip_val": None},
    ],
    ids=str,
)
def test_a_module_logs_the_same_losses_and_norms(tmp_path: Path, trainer: dict[str, Any]) -> None:
    logged = with_lightning.train(STREAMED, tmp_path, **trainer)
    assert logged == with_lightning.train(None, tmp_path, **trainer)
    assert all(norm > 0 for _, norm in logged)


@pytest.mark.parametrize(
    ("offload", "precision"),
    [(STREAMED, "32-true"), ({"state": "split16"}, "bf16-mixed"), (STREAMED, "bf16-true")],
    ids=str,
)
def test_resumes_to_the_same_losses(
    tmp_path: Path, offload: dict[str, Any], precision: str
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    # Two steps are an epoch: within one, Lightning begins the data again.
    run = dict(precision=precision, accumulate_grad_batches=2, limit_train_batches=4, max_steps=5)
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    once = with_lightning.train(offload, tmp_path, callbacks=[callback], **run)
    at = tmp_path / "step=2.ckpt"
    assert with_lightning.train(offload, tmp_path, resume=at, **run) == once[2:]
    files = {path.name for path in tmp_path.glob("step=*")}
    assert files == {f"step={n}.ckpt{end}" for n in (2, 4) for end in ("", ".offload")}


def test_a_checkpoint_is_removed_with_its_state(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    last = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)
    with_lightning.train({}, tmp_path, callbacks=[last])
    assert {path.name for path in tmp_path.iterdir()} == {"step=6.ckpt", "step=6.ckpt.offload"}
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=False)["state_dict"]
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_fp16_is_scaled_by_the_engine(tmp_path: Path) -> None:
    """On a CPU Lightning has no such precision: the plugin is given its name."""
    runner, module = with_lightning.make({}, tmp_path, max_steps=2)
    runner.strategy._casts.precision = "16-mixed"
    runner.fit(module, loader())
    expected = with_lightning.train(None, tmp_path, max_steps=2)
    assert [loss for loss, _ in expected] == pytest.approx(module.losses, abs=2e-3)
    assert [norm for _, norm in expected] == pytest.approx(module.norms, rel=5e-3)


def test_validation_and_a_second_fit(tmp_path: Path) -> None:
    runner, module = with_lightning.make(STREAMED, tmp_path, max_steps=3)
    plain, plain_module = with_lightning.make(None, tmp_path, max_steps=3)
    for trainer, fitted in ((runner, module), (plain, plain_module)):
        trainer.fit(fitted, loader(), loader())
        trainer.validate(fitted, loader(), verbose=False)
    assert module.validated == pytest.approx(plain_module.validated, rel=1e-6)
    again, _ = with_lightning.make(STREAMED, tmp_path, max_steps=2)
    again.fit(module, loader())
    assert len(module.losses) == 5


@pytest.mark.parametrize(
    ("trainer", "offload", "message"),
    [
        ({"gradient_clip_algorithm": "value"}, {}, "gradient_clip_algorithm"),
        ({"sync_batchnorm": True}, {}, "sync_batchnorm"),
        ({"precision": "64-true"}, {}, "mixed precision '64-true'"),
        ({"accumulate_grad_batches": 2}, {"grad_accum_steps": 3}, "by the Trainer"),
    ],
    ids=str,
)
def test_what_is_refused(
    tmp_path: Path, trainer: dict[str, Any], offload: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        with_lightning.train(offload, tmp_path, **trainer)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    runner, module = with_lightning.make({}, tmp_path)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters())
    with pytest.raises(TypeError, match=r"strategy\.offload"):
        runner.fit(module, loader())


def unfreezing(module: Any, at: dict[int, str]) -> Any:
    """Freeze submodules before training; train each with a group of its own from an epoch on."""
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze([module(pl_module, name) for name in at.values()])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch in at:
                part = module(pl_module, at[epoch])
                self.unfreeze_and_add_param_group(part, optimizer, lr=1e-3)

    return Unfreezing()


PARTS = {1: "model.layers.0", 2: "model.embed_tokens"}


@pytest.mark.parametrize("offload", [{}, STREAMED, {"update": "speculative"}], ids=str)
def test_a_callback_unfreezes_part_after_part(tmp_path: Path, offload: dict[str, Any]) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def logged(options: dict[str, Any] | None, folder: Path, resume: Path | None = None) -> Any:
        callbacks = [unfreezing(lambda module, name: module.net.get_submodule(name), PARTS)]
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1))
        run = {"callbacks": callbacks, "limit_train_batches": 2, "precision": "32-true"}
        return with_lightning.train(options, folder, resume=resume, **run)

    folders = tmp_path / "offloaded", tmp_path / "plain"
    once, plain = (logged(o, f) for o, f in zip((offload, None), folders, strict=True))
    assert once == plain
    # Lightning restores groups, and leaves what was unfrozen before frozen.
    again = [
        logged(o, f, resume=f / "step=3.ckpt")
        for o, f in zip((offload, None), folders, strict=True)
    ]
    assert again[0] == again[1] and len(again[0]) == 3


@pytest.mark.parametrize("offload", [{}, STREAMED], ids=str)
def test_a_callback_changes_the_number_of_microbatches(
    tmp_path: Path, offload: dict[str, Any]
) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    logged = []
    for options in (offload, None):
        callback = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
        run = {"limit_train_batches": 5, "max_epochs": 3, "max_steps": -1, "callbacks": [callback]}
        runner, module = with_lightning.make(options, tmp_path, **run)
        runner.fit(module, loader())
        logged.append([[round(x, 4) for x in xs] for xs in (module.losses, module.norms)])
    assert logged[0] == logged[1] and len(logged[0][1]) == 5 + 2 + 3
