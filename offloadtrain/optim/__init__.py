"""Optimizers: the update of one bucket, loss scaling, and schedules."""

from offloadtrain.optim.adam import Adam, AdamW
from offloadtrain.optim.rule import UpdateRule
from offloadtrain.optim.scaler import LossScaleError, LossScaler
from offloadtrain.step.formats import StateFormat

__all__ = [
    "Adam",
    "AdamW",
    "LossScaleError",
    "LossScaler",
    "StateFormat",
    "UpdateRule",
]
