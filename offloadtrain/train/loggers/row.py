"""A row of scalars, made from an event of the run log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from offloadtrain.events import schema

Scalar: TypeAlias = int | float | bool
Source: TypeAlias = schema.Step | schema.Eval | schema.Memory

STEP_SCALARS = (
    *("loss", "lr", "grad_norm", "clip_coef", "loss_scale", "skipped", "tokens"),
    *("tokens_per_s", "mfu", "step_ms", "exposed_ms"),
)
"""Fields of `schema.Step` that loggers get."""


@dataclass(frozen=True, slots=True)
class Row:
    """Scalars of one event.

    Attributes:
        step: as in the event; a skipped step and the one after it have the same number.
        time_s: Unix time of the event.
        values: name → value; unknown ones are left out.
    """

    step: int
    time_s: float
    values: dict[str, Scalar]


class Logger(Protocol):
    """A destination of rows. It is made, used and closed on one thread, which may block."""

    def log(self, row: Row) -> None:
        """Rows come in the order of the run; any exception ends the logger, not the run."""

    def close(self, *, failed: bool) -> None:
        """Write what is left."""


def row_of(event: Source, time_s: float) -> Row:
    values: dict[str, Scalar]
    if isinstance(event, schema.Eval):
        values = {"val_loss": event.val_loss}
    elif isinstance(event, schema.Memory):
        values = {f"peak_bytes/{row.tier}/{row.owner}": row.peak_bytes for row in event.rows}
    else:
        known = ((name, getattr(event, name)) for name in STEP_SCALARS)
        values = {name: value for name, value in known if value is not None}
    return Row(event.step, time_s, values)
