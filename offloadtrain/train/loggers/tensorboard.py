"""TensorBoard: scalars, and the job as hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offloadtrain.config.job import Config, as_tables
from offloadtrain.train.loggers.row import Row

_FLUSH_S = 10


class TensorBoard:
    """Event files, one per start; readers drop what a resumed run does again."""

    def __init__(self, folder: Path, config: Config, kept_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        again = kept_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=again, flush_secs=_FLUSH_S)
        job = dict(_flat(as_tables(config)))
        for summary in hparams(job, {"loss": 0.0, "val_loss": 0.0}):
            self._writer._get_file_writer().add_summary(summary, again)

    def log(self, row: Row) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step, row.time_s)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value; what is no number, bool or string becomes a string."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            yield f"{prefix}{key}", value if plain else str(value)
