"""`python -m benchmarks.gpu --out DIR [--budget-minutes 8] [--only GROUP,…] [--gpu-memory 32GiB]`.

Runs the tests marked `gpu`, then the measurements in order of value until the time is used up; each
in a process of its own, its figures written before the next begins. Started again on the same day
it goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.planned import planned
from benchmarks.gpu.results import Results, machine, title
from benchmarks.gpu.suite import Item, items
from offloadtrain.plan.machine import Machine
from offloadtrain.units import parse_bytes

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
    traced = next((i.name for i in chosen if i.spec and i.spec.system == "offloadtrain"), "")
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
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cap = parse_bytes(options.gpu_memory) if options.gpu_memory else 0
    card = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    found = items(toy=options.toy, gpu_memory=cap, host_memory=host, card=card)
    groups = [group for group in options.only.split(",") if group]
    unknown = set(groups) - {item.group for item in found}
    if unknown:
        known = ", ".join(dict.fromkeys(item.group for item in found))
        raise SystemExit(f"--only {options.only}: {unknown.pop()!r} is not one of {known}")
    return [item for item in found if not groups or item.group in groups]


def _run(
    item: Item, results: Results, options: argparse.Namespace, left: float, *, traced: bool
) -> dict[str, Any]:
    """Its figures, or {"error": …}. `traced`: a step's timeline is kept beside the results."""
    toy = ["--toy"] if options.toy else []
    if item.group == "tests":
        return _tests(options.out, left, toy=options.toy)
    if item.spec is not None:
        trace = options.out / f"{results.path.stem}-trace.json"
        arguments = ["benchmarks.gpu.step", item.spec.dumps(), *([str(trace)] if traced else [])]
        found = _process(arguments, min(left, 2 * item.seconds))
        return found | _beside(item, results, found)
    if item.group == "largest":
        assert item.detail is not None
        bytes_ = str(item.detail["gpu_memory"])
        return _process(["benchmarks.gpu.largest", bytes_, *toy], min(left, 2 * item.seconds))
    if item.group == "convergence":
        assert item.detail is not None
        data = str(options.out / "data")
        return _process(["benchmarks.gpu.convergence", item.detail["case"], data, *toy], left)
    return _process(["benchmarks.gpu.machine", *toy], left)


def _beside(item: Item, results: Results, found: dict[str, Any]) -> dict[str, Any]:
    """The plan's word on it, once the machine is measured."""
    rates = results.get("machine").get("machine")
    if rates is None or "figures" not in found or item.spec is None:
        return {}
    if item.spec.system != "offloadtrain":
        return {}
    return {"planned": planned(item.spec, Machine(**rates))}


def _tests(out: Path, left: float, *, toy: bool) -> dict[str, Any]:
    """The verdict of pytest over what is marked `gpu`; `toy`: only what is collected."""
    files, left_out = test_files()
    arguments = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
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
    needs = {"tests/trainer": "cyclopts", "tests/cli": "cyclopts", "tests/tui": "textual"}
    marked, left_out = [], []
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
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
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
        mfu = f", MFU {figures['mfu']:.3f}" if figures["mfu"] else ""
        return f"{figures['step_s']:.3f} s, {figures['tokens_per_s']:.0f} tokens/s{mfu}"
    return str(found.get("summary", "measured"))


if __name__ == "__main__":
    sys.exit(main())
