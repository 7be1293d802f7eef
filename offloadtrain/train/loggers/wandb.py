"""Weights & Biases, in the mode of its own settings (WANDB_MODE)."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.boundary.safe_write import own_folder, replace_file
from offloadtrain.config.job import Config, as_tables
from offloadtrain.train.loggers.row import Row

_MOST_BYTES = 1 << 16
_INIT_WITHIN_S, FINISH_WITHIN_S = 30, 10


class Wandb:
    """One W&B run for all starts of a run folder.

    A W&B run cannot take rows back. `wandb/run.json` keeps its id and its last step, so that a
    start resumed from an earlier checkpoint does not send steps again.
    """

    def __init__(self, run: Path, config: Config, kept_step: int) -> None:
        """
        Raises:
            ValueError: no key is known, and the mode is online; W&B would ask on the terminal.
        """
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError("no key: run `wandb login`, or set WANDB_MODE=offline")
        self._state = run / "wandb" / "run.json"
        own_folder(self._state.parent)
        known = kept_step >= 0 and self._state.exists()
        state = read_json(self._state, max_bytes=_MOST_BYTES) if known else {}
        self._id: str = state.get("id") or secrets.token_hex(8)
        self._sent_step = self._last_step = int(state.get("last_step", -1))
        self._run: Any = wandb.init(
            project=config.log.project or None,
            name=run.name,
            id=self._id,
            resume="allow" if known else None,
            dir=run,
            config=as_tables(config),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", init_timeout=_INIT_WITHIN_S, finish_timeout=FINISH_WITHIN_S
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Row) -> None:
        if row.step <= self._sent_step:
            return
        self._run.log({"step": row.step, **row.values})
        if row.step > self._last_step and not row.values.get("skipped"):
            self._last_step = row.step
            replace_file(self._state, json.dumps({"id": self._id, "last_step": self._last_step}))

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
