"""`offloadtrain report`."""

from __future__ import annotations

from pathlib import Path


def report(
    folder: Path = Path("benchmarks/results"), /, *, all: bool = False, plot: Path | None = None
) -> None:
    """Print the steps measured on GPUs as a table, from results files only.

    Parameters
    ----------
    folder
        Folder with the results files of `make gpu`.
    all
        Also print plans, goals, the machine's rates and what was not measured.
    plot
        Also draw ratios, rates and exposed time as SVG files into this folder.
    """
    from offloadtrain.cli import results

    if not folder.is_dir():
        raise results.ResultsError(f"{folder}: no such folder; make gpu writes results")
    files = results.read(folder)
    if plot is not None:
        from offloadtrain.cli.results.plots import plot as draw

        draw(files, plot)
    print(results.everything(files) if all else results.summary(files))
