"""Prints how large and how entangled the program is: "today | goal".

    python -m tools.house [--json] [--skip-cases]
    python -m tools.house --branches

The rules of counting stay as they are, so that figures of different commits can be compared:

* Statements: every `ast.stmt` node, except expressions that are a bare string (docstrings). Lines,
  comments and formatting do not count.
* One gradient: a profile (`sys.setprofile`) of a backward of three linear layers on the CPU, with
  bf16 weights, clipping and the fastest kernels that are there. It begins in the post-accumulate
  hook of the parameter that gets its gradient last, with which the first block is complete, and
  ends when `optimizer.backward` returns.
  Counted are the functions of this package that are entered, their files, and how often one call
  is in another file than the call before it. `optimizer.step()` is profiled in the same way.
* Attributes of a class: fields declared in its body, except ClassVar, and names that its methods
  assign as `self.NAME`. Those of base classes do not count.
* Arguments of `offload`: the named parameters of its signature; `**options` is none.
* Names: every name that is bound as a variable, argument or attribute, without leading underscores;
  the share of `VAGUE_WORDS` in them.
* Branches on placement: conditions in `step/`, `engine/` and `parallel/`, except in the layout
  (`step/layout`, `step/spec`), that read an option or a predicate of placement. That is an
  attribute named in `PLACEMENT_OPTIONS`, or with a word of `PLACEMENT_WORDS` in its lower-case name
  (except `device` alone and sizes, `..._numel` and `..._bytes`), or a member of Tier. Conditions
  are the tests of `if`, `while`, conditional expressions and comprehensions, subjects of `match`,
  and other boolean operations (`and`, `or`, `not`); one inside of another is a part of it.
  `--branches` lists them.
* Cases of tests: as many as `pytest --collect-only --level full` collects, GPU tests included.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_ATTRIBUTES = 15

VAGUE_WORDS = frozenset(
    "one found own told given held kept whole asked beside behind others mine theirs twin said "
    "seen taken".split()
)
"""Names that do not say what a thing is."""

PLACEMENT_OPTIONS = frozenset(
    "state_on scratch_dir scratch_in_memory grad_on sums_on sums_down working device_slots "
    "resident_blocks zero_stage activation recompute_blocks partition_activations keep_whole "
    "reduction checkpoint_spill offload_saved_above".split()
)
PLACEMENT_WORDS = frozenset(
    "device host disk tier streamed streams shard snapshot pending spill spilled resident".split()
)

Function = tuple[str, str, int]
"""File, name and line of a function."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of today, and the most that it should be.

    Attributes:
        unit: "" or "%".
    """

    name: str
    today: float
    goal: float
    unit: str = ""


def parsed(folders: Iterable[Path]) -> dict[Path, ast.Module]:
    """Parse the Python files below folders, except caches."""
    files = (file for folder in folders for file in folder.rglob("*.py"))
    return {file: ast.parse(file.read_text("utf-8")) for file in sorted(files)}


def count_statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_bare_string(node) for node in ast.walk(tree))


def _is_bare_string(node: ast.stmt) -> bool:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return False
    return isinstance(node.value.value, str)


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names of the attributes that a class itself declares or assigns."""
    names = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                names.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= set(_assigned_to_self(statement))
    return names


def _assigned_to_self(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if not method.args.args or method.args.args[0].arg != "self":
        return
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def large_classes(trees: Iterable[ast.AST]) -> list[tuple[str, int]]:
    """Return the classes with too many attributes, the largest first."""
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    sizes = [(node.name, len(attributes_of(node))) for node in classes]
    return sorted(((n, size) for n, size in sizes if size > MOST_ATTRIBUTES), key=lambda x: -x[1])


def bound_names(tree: ast.AST) -> Counter[str]:
    """Count the names that code binds, without their leading underscores."""
    names: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id.lstrip("_")] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names[node.attr.lstrip("_")] += 1
        elif isinstance(node, ast.arg):
            names[node.arg.lstrip("_")] += 1
    return names


def vague_percent(trees: Iterable[ast.AST]) -> float:
    """Return the share of bound names that are vague words, in percent."""
    names = sum((bound_names(tree) for tree in trees), Counter[str]())
    return 100 * sum(names[word] for word in VAGUE_WORDS) / max(names.total(), 1)


def placement_branches(tree: ast.AST) -> list[ast.expr]:
    """Return the conditions that read an option or a predicate of placement."""
    return [test for test in _conditions(tree) if any(map(_reads_placement, ast.walk(test)))]


def _conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield every condition once: one inside of another is a part of it."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):  # from the outside in
        for test in _tests_of(node):
            if test not in inside:
                yield test
                inside |= set(ast.walk(test))


def _tests_of(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.Match():
            return [node.subject]
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return [node]
    return []


def _reads_placement(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    if isinstance(node.value, ast.Name) and node.value.id == "Tier":
        return True
    name = node.attr
    if name in PLACEMENT_OPTIONS:
        return True
    is_predicate = name.islower() and name != "device" and not name.endswith(("_numel", "_bytes"))
    return is_predicate and not PLACEMENT_WORDS.isdisjoint(name.split("_"))


def _sees_layout(file: Path) -> bool:
    """True for files that should take placement from the layout and not from the options."""
    parts = file.relative_to(ROOT / "offloadtrain").parts
    in_layout = parts[:2] in (("step", "spec"), ("step", "layout"))
    return parts[0] in ("step", "engine", "parallel") and not in_layout


def profile() -> dict[str, int]:
    """Profile a backward and a step in a process of its own; return the figures of `_profile`."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    paths = [str(ROOT), str(ROOT / "tui"), *filter(None, [os.environ.get("PYTHONPATH")])]
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.house", "--profile"],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, int] = json.loads(printed.stdout)
    return figures


def _profile() -> dict[str, int]:
    import inspect
    import threading
    from types import FrameType

    import torch
    from torch import Tensor, nn

    import offloadtrain

    package = str(Path(offloadtrain.__file__).parent) + os.sep
    calls: list[Function] = []
    hooked_at: list[int] = []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    for param in model.parameters():  # before the engine's own hooks, which run after these
        param.register_post_accumulate_grad_hook(lambda _: hooked_at.append(len(calls)))
    optimizer = offloadtrain.offload(
        model, offloadtrain.AdamW(lr=1e-3), device="cpu", precision="bf16", clip_norm=1.0
    )

    def loss() -> Tensor:
        outputs: Tensor = model(torch.randn(4, 16))
        return outputs.float().square().mean()

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            calls.append((code.co_filename, code.co_name, code.co_firstlineno))

    for _ in range(3):
        optimizer.backward(loss())
        optimizer.step()
        optimizer.zero_grad()
    value = loss()
    threading.setprofile(record)
    sys.setprofile(record)
    hooked_at.clear()
    optimizer.backward(value)
    gradient = calls[hooked_at[-1] :]
    calls.clear()
    optimizer.step()
    sys.setprofile(None)
    threading.setprofile(None)
    step = list(calls)
    parameters = inspect.signature(offloadtrain.offload).parameters.values()
    return {
        "gradient_functions": len(set(gradient)),
        "gradient_files": len(files_of(gradient)),
        "gradient_moves": moves_between_files(gradient),
        "step_files": len(files_of(step)),
        "offload_arguments": sum(each.kind is not each.VAR_KEYWORD for each in parameters),
    }


def files_of(calls: Iterable[Function]) -> set[str]:
    return {file for file, _, _ in calls}


def moves_between_files(calls: list[Function]) -> int:
    """Count the calls that are in another file than the call before them."""
    return sum(call[0] != before[0] for before, call in pairwise(calls))


def count_cases() -> int:
    """Count the cases of all tests at level full."""
    printed = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"),
            *("--level", "full", "tests"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return sum("::" in line for line in printed.stdout.splitlines())


def measure(*, with_cases: bool = True) -> list[Figure]:
    """Return all figures, those of the code first."""
    product = parsed([ROOT / "offloadtrain"])
    packages: dict[str, list[ast.Module]] = {"core": [], "parallel": [], "convert": []}
    for file, tree in product.items():
        package = file.relative_to(ROOT / "offloadtrain").parts[0]
        packages[package if package in packages else "core"].append(tree)
    monitor = parsed([ROOT / "tui"]).values()
    tests = parsed([ROOT / "tests"]).values()
    engine = parsed([ROOT / "offloadtrain" / "engine"]).values()
    branching = (tree for file, tree in product.items() if _sees_layout(file))
    profiled = profile()

    def statements(trees: Iterable[ast.AST]) -> int:
        return sum(map(count_statements, trees))

    figures = [
        Figure("statements: core", statements(packages["core"]), 20_000),
        Figure("statements: parallel/", statements(packages["parallel"]), 3_500),
        Figure("statements: convert/", statements(packages["convert"]), 1_200),
        Figure("statements: tui", statements(monitor), 4_000),
        Figure("one gradient: functions", profiled["gradient_functions"], 45),
        Figure("one gradient: files", profiled["gradient_files"], 12),
        Figure("one gradient: moves between files", profiled["gradient_moves"], 40),
        Figure("step(): files", profiled["step_files"], 18),
        Figure(
            "branches on placement outside the layout",
            sum(len(placement_branches(tree)) for tree in branching),
            5,
        ),
        Figure(
            f"classes with more than {MOST_ATTRIBUTES} attributes",
            len(large_classes(product.values())),
            4,
        ),
        Figure("arguments of offload()", profiled["offload_arguments"], 3),
        Figure("vague names: offloadtrain/", vague_percent(product.values()), 0.3, "%"),
        Figure("vague names: engine/", vague_percent(engine), 0.3, "%"),
        Figure("vague names: tests/", vague_percent(tests), 0.3, "%"),
        Figure("statements: tests/", statements(tests), 23_000),
    ]
    if with_cases:
        figures.append(Figure("cases of tests at level full", count_cases(), 6_000))
    return figures


def as_table(figures: Iterable[Figure]) -> str:
    rows = [("", "today", "goal")]
    for figure in figures:
        text = "{:,.1f} %" if figure.unit else "{:,.0f}"
        rows.append((figure.name, text.format(figure.today), "≤ " + text.format(figure.goal)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = (
        f"{name:{widths[0]}}  {today:>{widths[1]}} | {goal:>{widths[2]}}"
        for name, today, goal in rows
    )
    return "\n".join(lines)


def list_branches() -> Iterator[str]:
    """Yield file, line and text of each branch on placement outside the layout."""
    for file, tree in parsed([ROOT / "offloadtrain"]).items():
        for test in placement_branches(tree) if _sees_layout(file) else ():
            yield f"{file.relative_to(ROOT)}:{test.lineno}: {ast.unparse(test)}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prints how large and entangled the program is.")
    parser.add_argument("--json", action="store_true", help="print one JSON object per figure")
    parser.add_argument("--skip-cases", action="store_true", help="do not collect the tests")
    parser.add_argument(
        "--branches", action="store_true", help="list the branches on placement, and nothing else"
    )
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.profile:
        print(json.dumps(_profile()))
        return
    if options.branches:
        print(*list_branches(), sep="\n")
        return
    figures = measure(with_cases=not options.skip_cases)
    if options.json:
        print(*(json.dumps(asdict(figure)) for figure in figures), sep="\n")
    else:
        print(as_table(figures))


if __name__ == "__main__":
    main()
