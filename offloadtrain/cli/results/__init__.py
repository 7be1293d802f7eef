"""Tables and plots from results files of `python -m benchmarks.gpu` alone."""

from offloadtrain.cli.results.goals import GOALS, Goal
from offloadtrain.cli.results.read import Curve, Pair, ResultsError, ResultsFile, Steps, read
from offloadtrain.cli.results.tables import NOTHING, everything, summary

__all__ = [
    "GOALS",
    "NOTHING",
    "Curve",
    "Goal",
    "Pair",
    "ResultsError",
    "ResultsFile",
    "Steps",
    "everything",
    "read",
    "summary",
]
