"""`offloadtrain report`."""

from __future__ import annotations

from pathlib import Path


def report(folder: Path = Path("benchmarks/results"), /, *, plot: Path | None = None) -> None:
    """Print the table of what was measured on GPUs, from results files and nothing else.

    Parameters
    ----------
    folder
        With the results files of `make gpu`.
    plot
        Also draw the rates into this SVG file.
    """
    from offloadtrain import results_table

    if not folder.is_dir():
        raise results_table.ResultsError(f"{folder}: no such folder; make gpu writes results")
    cells = results_table.read(folder)
    if plot is not None:
        results_table.plot(cells, plot)
    print(results_table.table(cells))
