"""Loss parity of the state formats: the demo model, several seeds, one curve per format.

    python -m benchmarks.state_formats run [--steps 600] [--seeds 1,2,3,4,5,6] [--out docs]
    python -m benchmarks.state_formats plot [--out docs]

`run` trains every format and seed and writes state_formats.json; `plot` (needs the extra "plots")
draws state_formats.svg from it. Both print the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STATES = ("fp32", "split16", "int8")
RESULT, PLOT = "state_formats.json", "state_formats.svg"
Curve = list[tuple[int, float]]


def curve_of(state: str, seed: int, steps: int) -> Curve:
    """Train the demo in a process of its own and return (step, validation loss)."""
    settings = (
        f"offload.state={state}",
        f"train.seed={seed}",
        f"train.steps={steps}",
        "train.eval_every=50",
        "train.eval_batches=32",
        "train.checkpoint_every=0",
        "device.threads=1",
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "offloadtrain",
            "train",
            "demo",
            "--run-dir",
            folder + "/run",
        ]
        subprocess.run([*command, "--set", *settings], check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run/events/rank000.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [(e["step"], e["val_loss"]) for e in events if e["k"] == "eval"]


def run(steps: int, seeds: list[int], processes: int) -> dict[str, Any]:
    """Every format and seed; a seed's formats see the same weights and the same batches."""
    cases = [(state, seed) for seed in seeds for state in STATES]
    with ThreadPoolExecutor(processes) as pool:
        curves = list(pool.map(lambda case: curve_of(case[0], case[1], steps), cases))
    found: dict[str, dict[str, Curve]] = {state: {} for state in STATES}
    for (state, seed), curve in zip(cases, curves, strict=True):
        found[state][str(seed)] = curve
    return {"job": "demo", "steps": steps, "curves": found}


def finals(result: dict[str, Any], state: str) -> dict[str, float]:
    return {seed: curve[-1][1] for seed, curve in result["curves"][state].items()}


def table(result: dict[str, Any]) -> str:
    """Final validation losses, and the differences from fp32 within a seed, in percent."""
    base = finals(result, "fp32")
    lines = [
        f"state    {'  '.join(f'seed {seed}' for seed in base)}   from fp32 with the same seed"
    ]
    for state in STATES:
        losses = "  ".join(f"{loss:.4f}" for loss in finals(result, state).values())
        lines.append(f"{state:8} {losses}   {difference(result, state)}")
    spread = 100 * statistics.stdev(base.values()) / statistics.mean(base.values())
    lines.append(f"one fp32 seed from another: standard deviation {spread:.2f} %")
    return "\n".join(lines)


def difference(result: dict[str, Any], state: str) -> str:
    """Mean over seeds and its standard error, in percent of fp32's final loss."""
    base, found = finals(result, "fp32"), finals(result, state)
    change = [100 * (found[seed] / base[seed] - 1) for seed in base]
    error = statistics.stdev(change) / len(change) ** 0.5 if len(change) > 1 else float("nan")
    return f"{statistics.mean(change):+.2f} +- {error:.2f} %"


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for state, style in zip(STATES, ("-", "--", ":"), strict=True):
        for axes, first in ((whole, 0), (end, result["steps"] // 2)):
            for number, curve in enumerate(result["curves"][state].values()):
                points = [(step, loss) for step, loss in curve if step >= first]
                label = state if number == 0 else None
                axes.plot(*zip(*points, strict=True), style, color=f"C{STATES.index(state)}",
                          label=label, linewidth=1.2)  # fmt: skip
    for axes in (whole, end):
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("validation loss (nats per byte)")
        axes.legend()
    figure.suptitle(f"State formats on the demo model, {len(result['curves']['fp32'])} seeds")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_formats")
    parser.add_argument("action", choices=("run", "plot"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="1,2,3,4,5,6")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    asked = parser.parse_args()
    path = asked.out / RESULT
    if asked.action == "run":
        result = run(asked.steps, [int(seed) for seed in asked.seeds.split(",")], asked.processes)
        path.write_text(json.dumps(result) + "\n")
    result = json.loads(path.read_text())
    if asked.action == "plot":
        plot(result, asked.out / PLOT)
    print(table(result))


if __name__ == "__main__":
    main()
