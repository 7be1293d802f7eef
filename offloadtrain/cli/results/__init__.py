"""Tables and plots from results files of `python -m benchmarks.gpu` alone.

Nothing is measured here, and nothing of a job is known; where no file has a figure, that is said.
Start at `read.py`, then `tables.py`.
"""

from offloadtrain.cli.results.goals import GOALS, Goal
from offloadtrain.cli.results.read import ResultsError, ResultsFile, Steps, read
from offloadtrain.cli.results.tables import NOTHING, everything, summary

__all__ = [
    "GOALS",
    "NOTHING",
    "Goal",
    "ResultsError",
    "ResultsFile",
    "Steps",
    "everything",
    "read",
    "summary",
]
