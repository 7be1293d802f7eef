"""`python -m benchmarks.gpu [--list 2] [--only GROUP,…] [--budget-minutes 8] [--out DIR]`.

Runs a list of the suite (1: the tests marked `gpu`, and what is asked first), or groups of either
in the order in which they are named, until the time is used up; each measurement in a process of
its own, its figures written before the next begins. Started again within a day it goes on where it
was cut off. `--budget-minutes 0` runs nothing and prints how long each may take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.planned import planned
from benchmarks.gpu.results import Results, machine, title
from benchmarks.gpu.suite import Here, Item, items
from benchmarks.gpu.systems import here, precision_of
from offloadtrain.config.units import format_bytes, parse_bytes
from offloadtrain.hardware.machine import Machine
from offloadtrain.hardware.peak_flops import peak_flops

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = "10"
"""Of pytest: the GPU tests then take 70 s."""
_START_MOST_S = 60.0
"""Of a process, where DeepSpeed compiles its Adam first."""
_LAST = 2000
"""Characters of a failed process's output that are kept."""


def main() -> int:
    """Exit code 1 if the tests failed, or a measurement did."""
    options = _arguments()
    began = time.monotonic()
    results = Results(options.out, title())
    command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:])
    results.describe(machine=machine(), command=command)
    failed, left_out = 0, []
    chosen = _chosen(options)
    traced = next((item.name for item in chosen if item.spec is not None), "")
    for item in chosen:
        left_s = max(60 * options.budget_minutes - (time.monotonic() - began), 0.0)
        if results.has(item.name):
            print(f"{item.name}: measured before", file=sys.stderr)
        elif left_s < item.seconds:
            left_out.append(item)
            print(
                f"{item.name}: left out, takes {item.seconds:.0f} s and {left_s:.0f} s are left",
                file=sys.stderr,
            )
        else:
            start = time.monotonic()
            found = _run(item, results, options, left_s, traced=item.name == traced)
            found["wall_s"] = time.monotonic() - start
            results.add(item.name, found)
            failed += "error" in found
            print(f"{item.name}: {_line(found)}", file=sys.stderr, flush=True)
    if left_out:
        groups = ",".join(dict.fromkeys(item.group for item in left_out))
        seconds = sum(item.seconds for item in left_out)
        print(f"left out: {len(left_out)}, which take {seconds:.0f} s: --only {groups}")
    print(results.path)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--budget-minutes", type=float, default=8.0)
    parser.add_argument("--list", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--only", default="", help="groups of either list, in this order: tests,machine"
    )
    parser.add_argument("--gpu-memory", default="", help="stands in for a smaller card: 32GiB")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Item]:
    found = items(_here(options.gpu_memory), toy=options.toy)
    groups = [group for group in options.only.split(",") if group]
    unknown = set(groups) - {item.group for item in found}
    if unknown:
        known = ", ".join(dict.fromkeys(item.group for item in found))
        raise SystemExit(f"--only {options.only}: {unknown.pop()!r} is not one of {known}")
    if groups:
        return [item for group in groups for item in found if item.group == group]
    return [item for item in found if item.list == options.list]


def _here(gpu_memory: str) -> Here:
    cap = parse_bytes(gpu_memory) if gpu_memory else 0
    if not torch.cuda.is_available():
        return Here(cap=cap)
    chosen = precision_of(here())
    flops = peak_flops(torch.cuda.get_device_name(0), chosen)
    return Here(cap=cap, flops=flops, precision=chosen)


def _run(
    item: Item, results: Results, options: argparse.Namespace, left_s: float, *, traced: bool
) -> dict[str, Any]:
    """Its figures, or {"error": …}. `traced`: a step's timeline is kept beside the results."""
    if not item.arguments:
        return _tests(options.out, left_s, toy=options.toy)
    more: list[str] = []
    if item.group == "job":
        more = [str(options.out / f"{results.path.stem}-run")]
    elif traced:
        more = [str(options.out / f"{results.path.stem}-trace.json")]
    found = _process([*item.arguments, *more], min(left_s, _START_MOST_S + 2 * item.seconds))
    return with_plan(item, results, found) | {"group": item.group}


def with_plan(item: Item, results: Results, found: dict[str, Any]) -> dict[str, Any]:
    """Add the plan's figures to what was found of ours, once the machine is measured."""
    rates: dict[str, Any] | None = results.get("machine").get("machine")
    if rates is None or item.spec is None or item.spec.system != "offloadtrain":
        return found
    if "figures" not in found:
        return found
    return found | {"planned": planned(item.spec, Machine(**rates))}


def _tests(out: Path, left_s: float, *, toy: bool) -> dict[str, Any]:
    """The verdict of pytest over what is marked `gpu`; `toy`: only what is collected."""
    files, left_out = test_files()
    # Warnings of whichever torch and plugins are there are no failures of ours.
    arguments = ["-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    arguments += files
    arguments += ["--collect-only"] if toy else []
    arguments += ["-n", PROCESSES] if find_spec("xdist") and not toy else []
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=left_s
        )
    except subprocess.TimeoutExpired as late:
        return {"error": f"no end in {left_s:.0f} s: {_tail(late.stdout)}"}
    (out / "pytest-gpu.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    summary = done.stdout.strip().splitlines()[-1:]
    found: dict[str, Any] = {"summary": " ".join(summary), "seconds": time.monotonic() - began}
    found |= {"left_out": left_out} if left_out else {}
    return found if done.returncode == 0 else found | {"error": _tail(done.stdout)}


def test_files() -> tuple[list[str], list[str]]:
    """Files with tests marked `gpu`, and those of them that need a package which is not here."""
    needs = {"tests/train": "cyclopts", "tests/cli": "cyclopts", "tests/tui": "textual"}
    marked: list[str] = []
    left_out: list[str] = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if "mark.gpu" not in text:
            continue
        packages = [package for folder, package in needs.items() if name.startswith(folder)]
        packages += ["hypothesis"] if "import given" in text else []
        missing = [package for package in packages if find_spec(package) is None]
        (left_out if missing else marked).append(name)
    return marked, left_out


def _process(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """What `python -m ARGUMENTS` prints as JSON."""
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        return {"error": f"no end in {limit_s:.0f} s: {_tail(late.stderr)}"}
    if done.returncode:
        return {"error": _tail(done.stderr) or f"ended with {done.returncode}"}
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(said[-1])
    return found


def _tail(text: str | bytes | None) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return (text or "")[-_LAST:].strip()


def _line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"failed: {found['error'].splitlines()[-1] if found['error'] else ''}"
    if "missing" in found:
        return str(found["missing"])
    figures = found.get("figures", {})
    if "tokens_per_s" in figures:
        line = f"{figures['step_s']:.3f} s, {figures['tokens_per_s']:.0f} tokens/s"
        line += f", MFU {figures['mfu']:.3f}" if figures.get("mfu") else ""
        if figures.get("right_guesses") is not None:
            line += f", {100 * figures['right_guesses']:.0f} % of the guesses were right"
        if "anonymous_bytes" in figures:
            line += f"; host: {format_bytes(figures['anonymous_bytes'])} of the process, "
            line += f"{format_bytes(figures['host_bytes'])} in the Ledger"
        return line
    return str(found.get("summary", "measured"))


if __name__ == "__main__":
    sys.exit(main())
