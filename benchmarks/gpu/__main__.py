"""`python -m benchmarks.gpu --out DIR [--budget-minutes 8] [--only GROUP,…] [--gpu-memory 32GiB]`.

Runs the tests marked `gpu`, then the measurements in order of value until the time is used up; each
in a process of its own, its figures written before the next begins. Started again within a day it
goes on where it was cut off.
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
from offloadtrain.config.units import parse_bytes
from offloadtrain.hardware.machine import Machine
from offloadtrain.hardware.peak_flops import peak_flops

ROOT = Path(__file__).resolve().parents[2]
_LAST = 2000
"""Characters of a failed process's output that are kept."""


def main() -> int:
    """Exit code 1 if the tests failed, or a measurement did."""
    options = _arguments()
    began = time.monotonic()
    results = Results(options.out, title())
    command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:])
    results.describe(machine=machine(), command=command)
    failed = 0
    chosen = _chosen(options)
    traced = next((item.name for item in chosen if len(item.specs) == 1), "")
    for item in chosen:
        left = 60 * options.budget_minutes - (time.monotonic() - began)
        if results.has(item.name):
            print(f"{item.name}: measured before", file=sys.stderr)
        elif left < item.seconds:
            print(f"{item.name}: left out, {left:.0f} s are left", file=sys.stderr)
        else:
            found = _run(item, results, options, left, traced=item.name == traced)
            results.add(item.name, found)
            failed += "error" in found
            print(f"{item.name}: {_line(found)}", file=sys.stderr, flush=True)
    print(results.path)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--budget-minutes", type=float, default=8.0)
    parser.add_argument("--only", default="", help="groups, with commas between")
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
    return [item for item in found if not groups or item.group in groups]


def _here(gpu_memory: str) -> Here:
    cap = parse_bytes(gpu_memory) if gpu_memory else 0
    if not torch.cuda.is_available():
        return Here(card=0, cap=cap)
    card = torch.cuda.get_device_properties(0)
    chosen = precision_of(here())
    flops = peak_flops(card.name, chosen)
    return Here(card=card.total_memory, cap=cap, flops=flops, precision=chosen)


def _run(
    item: Item, results: Results, options: argparse.Namespace, left: float, *, traced: bool
) -> dict[str, Any]:
    """Its figures, or {"error": …}. `traced`: a step's timeline is kept beside the results."""
    if not item.arguments:
        return _tests(options.out, left, toy=options.toy)
    trace = [str(options.out / f"{results.path.stem}-trace.json")] if traced else []
    found = _process([*item.arguments, *trace], min(left, 2 * item.seconds))
    return with_plans(item, results, found) | {"group": item.group}


def with_plans(item: Item, results: Results, found: dict[str, Any]) -> dict[str, Any]:
    """The plan's word on ours beside what was found, once the machine is measured."""
    rates: dict[str, Any] | None = results.get("machine").get("machine")
    if rates is None:
        return found
    for spec in item.specs:
        measured = found.get("systems", {}).get(spec.name, found)
        if spec.system == "offloadtrain" and "figures" in measured:
            measured["planned"] = planned(spec, Machine(**rates))
    return found


def _tests(out: Path, left: float, *, toy: bool) -> dict[str, Any]:
    """The verdict of pytest over what is marked `gpu`; `toy`: only what is collected."""
    files, left_out = test_files()
    # Warnings of whichever torch and plugins are there are no failures of ours.
    arguments = ["-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    arguments += files
    arguments += ["--collect-only"] if toy else []
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=left
        )
    except subprocess.TimeoutExpired as late:
        return {"error": f"no end in {left:.0f} s: {_tail(late.stdout)}"}
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
    if "ratio" in found:
        return f"ratio {found['ratio']:.2f} of steps in turn"
    figures = found.get("figures", {})
    if "tokens_per_s" in figures:
        mfu = f", MFU {figures['mfu']:.3f}" if figures.get("mfu") else ""
        return f"{figures['step_s']:.3f} s, {figures['tokens_per_s']:.0f} tokens/s{mfu}"
    return str(found.get("summary", "measured"))


if __name__ == "__main__":
    sys.exit(main())
