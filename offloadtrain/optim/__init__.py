"""Optimizers: the update of one bucket, loss scaling, and schedules."""

from offloadtrain.optim.adam import Adam, AdamW
from offloadtrain.optim.loss_scaler import LossScaleError, LossScaler
from offloadtrain.optim.rule import UpdateRule
from offloadtrain.step.formats import StateFormat

__all__ = [
    "Adam",
    "AdamW",
    "LossScaleError",
    "LossScaler",
    "StateFormat",
    "UpdateRule",
]
