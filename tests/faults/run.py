"""Plant every fault in turn and run its tests: python -m tests.faults.run [PATTERN...]

Each worker has a copy of the source tree. For each fault it replaces the fault's text in its copy,
runs the tests that the fault names until the first failure, and restores the file. Before that all
named tests run once without a fault, and must pass. A pattern selects faults whose name contains
it; it may hold `*`.

The exit code is 0 only if every selected fault was found.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tests.faults import native_build, worker
from tests.faults.catalogue import ROOT, CatalogueError, Fault, load, problems

SEED = 1
"""Of the cases and lanes that the tests draw: the same in every run."""
LIMIT_S = 150.0
"""For the tests of one fault. A test that hangs does not count as one that finds the fault."""
CONTROL_LIMIT_S = 900.0

FOUND, SURVIVED, TIMED_OUT, ERROR = "found", "SURVIVED", "TIMED OUT", "ERROR"

PRELOADED = ("torch", "numpy", "numba", "pytest", "hypothesis", "textual.app")
"""What most tests import, and nothing that imports offloadtrain."""

# An editable install maps the packages to the repository before `sys.path` is searched.
_SITE = """\
import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__
]
"""


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
        by: the first test that failed; "" if none did.
        output: the end of what pytest printed.
    """

    fault: Fault
    outcome: str
    seconds: float
    by: str = ""
    output: str = ""


class Worker:
    """A copy of the source tree, and a process that runs tests in it."""

    def __init__(
        self,
        folder: Path,
        files: Iterable[str],
        extension: Path | None,
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        self.tree = folder / "tree"
        self._temporary = folder / "tmp"
        self._output = folder / "output.txt"
        self._numba = folder / "numba"
        self._extension = extension
        for file in files:
            (self.tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, self.tree / file)
        # In the root: tests that start commands set PYTHONPATH to it.
        (self.tree / "sitecustomize.py").write_text(_SITE)
        self._use(extension)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (self.tree, self.tree / "tui")))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker", *preloaded],
            cwd=self.tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def control(self, tests: Sequence[str], level: str = "quick") -> str:
        """Run tests without a fault; returns the output if any fails."""
        answer = self._pytest(tests, level, CONTROL_LIMIT_S, {})
        return "" if answer["code"] == 0 else f"{answer['code']}: {self._tail()}"

    def plant(self, fault: Fault, switch: int, library: Path | None) -> Result:
        """Run the tests of a fault with the fault in place.

        Args:
            switch: the number of a native fault in `library`.
        """
        with ExitStack() as stack:
            environment = {}
            if fault.is_native:
                self._use(library)
                stack.callback(self._use, self._extension)
                environment[native_build.VARIABLE] = str(switch)
            else:
                stack.enter_context(_planted(self.tree / fault.file, fault))
            if "runtime/kernels/" in fault.file:
                # Numba's cache of a kernel does not notice that a function it calls has changed.
                environment["NUMBA_CACHE_DIR"] = stack.enter_context(
                    tempfile.TemporaryDirectory(dir=self._numba.parent)
                )
            answer = self._pytest(["-x", *fault.tests], fault.level, LIMIT_S, environment)
        text = self._output.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+?)(?:\[| |$)", text, re.MULTILINE)
        by = failed[1] if failed else ""
        code = answer["code"]
        if code == 0:
            outcome = SURVIVED
        elif code == 1 or (isinstance(code, int) and code < 0):
            outcome = FOUND
        else:
            outcome = TIMED_OUT if code == worker.TIMED_OUT else ERROR
        return Result(fault, outcome, answer["seconds"], by, self._tail())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _use(self, library: Path | None) -> None:
        if library is not None:
            # A new file: the process of an earlier test may still have the last one in memory.
            target = self.tree / "offloadtrain" / library.name
            target.unlink(missing_ok=True)
            shutil.copy2(library, target)

    def _pytest(
        self, arguments: Sequence[str], level: str, limit_s: float, environment: dict[str, str]
    ) -> dict[str, Any]:
        options = ["-q", "-p", "no:cacheprovider", "--level", level, "--seed", str(SEED)]
        # A plugin that the worker has imported before pytest asked for it: Hypothesis.
        options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        job = {
            "arguments": [*options, f"--basetemp={self._temporary}", *arguments],
            "limit_s": limit_s,
            "output": str(self._output),
            "environment": {"NUMBA_CACHE_DIR": str(self._numba), **environment},
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        answer: dict[str, Any] = json.loads(line)
        shutil.rmtree(self._temporary, ignore_errors=True)
        return answer

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-3000:]


@contextmanager
def _planted(path: Path, fault: Fault) -> Any:
    """Replace the text in the file for a while."""
    source, times = path.read_text(), path.stat()
    cached = [path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"]
    try:
        _remove(cached)
        path.write_text(fault.apply(source))
        yield
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        # Python compares whole seconds and sizes, which two faults may share.
        _remove(cached)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def select(faults: Iterable[Fault], patterns: Sequence[str]) -> list[Fault]:
    """Return the faults whose name contains one of the patterns; all if there are none."""
    return [
        fault
        for fault in faults
        if not patterns or any(fnmatch.fnmatch(fault.name, f"*{one}*") for one in patterns)
    ]


def source_files() -> list[str]:
    """List the files of the repository that exist, changed and new ones included."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return [file for file in listed if file and (ROOT / file).is_file()]


def installed_extension() -> Path | None:
    """Find the library of the native kernels, if they are built."""
    spec = importlib.util.find_spec("offloadtrain._native")
    return Path(spec.origin) if spec and spec.origin else None


def each(workers: Sequence[Worker], jobs: Sequence[Callable[[Worker], None]]) -> None:
    """Run the jobs, each on the next idle worker."""
    queue: SimpleQueue[Callable[[Worker], None]] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    errors: list[BaseException] = []

    def serve(on: Worker) -> None:
        while not errors:
            try:
                job = queue.get_nowait()
            except Empty:
                return
            try:
                job(on)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=serve, args=(on,)) for on in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run_controls(workers: Sequence[Worker], faults: Sequence[Fault]) -> list[str]:
    """Run every named test without a fault; returns what failed."""
    files: dict[tuple[str, str], set[str]] = defaultdict(set)
    for fault in faults:
        for test in fault.tests:
            files[test.partition("::")[0], fault.level].add(test)
    failures = []

    def job(file: str, level: str, tests: set[str]) -> Callable[[Worker], None]:
        def run(on: Worker) -> None:
            output = on.control([file] if file in tests else sorted(tests), level)
            if output:
                failures.append(f"{file} fails without a fault: {output}")

        return run

    each(workers, [job(file, level, tests) for (file, level), tests in sorted(files.items())])
    return failures


def run_faults(
    workers: Sequence[Worker], faults: Sequence[Fault], library: Path | None
) -> list[Result]:
    """Plant each fault and print what became of it."""
    results = []
    switches = {fault.name: number for number, fault in enumerate(_native(faults), 1)}

    def job(fault: Fault) -> Callable[[Worker], None]:
        def run(on: Worker) -> None:
            result = on.plant(fault, switches.get(fault.name, 0), library)
            results.append(result)
            print(
                f"{result.outcome:9} {result.seconds:6.1f} s  {fault.name}  ({fault.operator})"
                + (f"  {result.by}" if result.by else ""),
                flush=True,
            )
            if result.outcome == ERROR:
                print(result.output, flush=True)

        return run

    each(workers, [job(fault) for fault in faults])
    return results


def _native(faults: Iterable[Fault]) -> list[Fault]:
    return [fault for fault in faults if fault.is_native]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="parts of names; may hold *")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--no-control", action="store_true", help="do not run the tests without a fault first"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    faults = select(load(), options.patterns)
    if not faults:
        print(f"no fault has a name like {' or '.join(options.patterns)}")
        return 1
    if sentences := problems(faults):
        print("does not apply:", *sentences, sep="\n  ")
        return 1
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as name, ExitStack() as stack:
        folder, files = Path(name), source_files()
        workers = []
        for number in range(options.workers):
            (folder / str(number)).mkdir()
            workers.append(Worker(folder / str(number), files, installed_extension()))
            stack.callback(workers[-1].close)
        library = None
        if native := _native(faults):
            print("Building the extension with the native faults.", flush=True)
            try:
                library = native_build.build(
                    workers[0].tree, list(enumerate(native, 1)), folder / "build"
                )
            except CatalogueError as error:
                print(error)
                return 1
        if not options.no_control:
            print("Running the tests without a fault.", flush=True)
            if failures := run_controls(workers, faults):
                print(*failures, sep="\n")
                return 1
            print(f"All pass, after {time.monotonic() - began:.0f} s.", flush=True)
        results = run_faults(workers, faults, library)
    counts = Counter(result.outcome for result in results)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"{len(results)} faults in {time.monotonic() - began:.0f} s: {summary}")
    for result in results:
        if result.outcome != FOUND:
            print(f"  {result.outcome} {result.fault.name}: {result.fault.about}")
    return 0 if counts[FOUND] == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
