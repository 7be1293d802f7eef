"""Optimizers: the update of one bucket, loss scaling, learning rates.

An update rule knows its hyperparameters and calls kernels over flat tensors; the engine decides
when it runs and on which tensors. A custom rule needs `rule.py` only (docs/extending.md).
Start at `rule.UpdateRule`; `adam.py` is the one that ships.
"""

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
