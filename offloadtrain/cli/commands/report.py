"""`offloadtrain report`."""

from __future__ import annotations

from pathlib import Path


def report(
    folder: Path = Path("benchmarks/results"), /, *, steps: bool = False, plot: Path | None = None
) -> None:
    """Print tables of the GPU measurements, from results files only.

    Parameters
    ----------
    folder
        Folder with the results files of `make gpu`.
    steps
        Print every measured step, and every failed measurement.
    plot
        Also draw ratios, rates, exposed time and losses as SVG files into this folder.
    """
    from offloadtrain.cli import results

    if not folder.is_dir():
        raise results.ResultsError(f"{folder}: no such folder; make gpu writes results")
    files = results.read(folder)
    if plot is not None:
        from offloadtrain.cli.results.plots import plot as draw

        draw(files, plot)
    print(results.everything(files) if steps else results.summary(files))
