"""Optimizers: the update of one bucket, loss scaling, and schedules."""

from offloadtrain.optim.adam import Adam, AdamW
from offloadtrain.optim.formats import FORMATS, StateFormat, check_format, format_for, recognise
from offloadtrain.optim.rule import UpdateRule
from offloadtrain.optim.scaler import LossScaleError, LossScaler

__all__ = [
    "FORMATS",
    "Adam",
    "AdamW",
    "LossScaleError",
    "LossScaler",
    "StateFormat",
    "UpdateRule",
    "check_format",
    "format_for",
    "recognise",
]
