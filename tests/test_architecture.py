"""Floors, doors and sizes: what may import what, what an import may load, how long code may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import offloadtrain

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path for folder in ("offloadtrain", "tui") for path in (ROOT / folder).rglob("*.py")
)
PACKAGE = [path for path in SOURCES if path.name != "__init__.py" and "tui" not in path.parts]
ROOMS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for path in SOURCES
    if path.name == "__init__.py" and path.parent != ROOT / "offloadtrain"
)
HEAVY = ("torch", "numpy", "numba", "pynvml", "psutil", "textual", "safetensors")
LONGEST_FILE, LONGEST_FUNCTION, MOST_FILES = (
    800,
    60,
    32,
)  # one idea a file, cut nowhere for its length


def _loaded_by(module: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after `import module`."""
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _too_long(source: str, longest: int) -> Iterator[str]:
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring.count("\n")
            if lines > longest:
                yield f"{node.name}: {lines} lines"


@cache
def _imports() -> dict[str, set[str]]:
    """Return what each file imports, wherever in the file."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        names = found.setdefault(path.name, set())
        for node in ast.walk(_tree(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    return found


def _importers(package: str) -> set[str]:
    return {
        file
        for file, names in _imports().items()
        if any(name == package or name.startswith(package + ".") for name in names)
    }


@pytest.mark.slow  # `make lint` runs it, too
def test_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint_imports], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


GROUND = (
    "config.job",
    "events.schema",
    "step.proof.prove",
    "config.model_shape",
    "hardware.machine",
)


def test_the_ground_floor_loads_nothing_heavy() -> None:
    assert _loaded_by(", ".join(f"offloadtrain.{module}" for module in GROUND)) == set()
    assert "numpy" in _loaded_by("numpy")


def test_the_packages_themselves_load_no_torch() -> None:
    paths = [str(ROOT), str(ROOT / "tui")]
    loaded = _loaded_by(f"sys; sys.path[:0] = {paths!r}; import offloadtrain, offloadtrain_tui")
    assert "torch" not in loaded


def test_every_public_name_is_there() -> None:
    for name in offloadtrain.__all__:
        assert getattr(offloadtrain, name) is not None
    errors = [getattr(offloadtrain, name) for name in offloadtrain.__all__ if "Error" in name]
    assert len(errors) >= 6 and all(issubclass(e, offloadtrain.OffloadTrainError) for e in errors)


def _circles() -> list[str]:
    """The modules of a circle of imports, imports inside functions and for types included."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE}
    below: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(_tree(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                asked = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                below[name] |= asked or {node.module} & modules.keys()
    try:
        TopologicalSorter(below).prepare()
    except CycleError as circle:
        return list(circle.args[1])
    return []


def test_no_module_imports_itself_in_a_circle() -> None:
    assert _circles() == []


def test_the_package_root_holds_folders() -> None:
    files = {path.name for path in (ROOT / "offloadtrain").glob("*.py")}
    assert files == {"__init__.py", "__main__.py"}


def test_every_room_is_small_and_says_where_to_start() -> None:
    """What lives there, what may not, where to start: in a few lines."""
    for room in ROOMS:
        told = ast.get_docstring(_tree((ROOT / room / "__init__.py").read_text())) or ""
        lines = told.partition("[Note: ")[0].splitlines()
        assert 4 <= len(lines) <= 8 and "Start at" in told, room
        for name in re.findall(r"`(\w+\.py)`", told):
            assert (ROOT / room / name).exists(), name
        assert len(list((ROOT / room).glob("*.py"))) <= MOST_FILES, room


def test_single_doors() -> None:
    assert _importers("numba") <= {"numba_operands.py"}
    assert _importers("llvmlite") <= {"numba_operands.py"}
    assert _importers("pynvml") <= {"nvml.py"}
    assert _importers("psutil") <= {"telemetry.py", "this_machine.py"}
    assert _importers("torch.distributed.pipelining") <= {"schedule.py"}
    assert _importers("torch.distributed.device_mesh") <= {"mesh.py", "api.py"}  # its type
    assert _importers("torch.distributed.checkpoint") <= {"torch_export.py"}
    doors = {"process_group.py", "rendezvous.py"}
    doors |= {
        "mesh.py",
        "api.py",
        "styles.py",
        "schedule.py",
        "expert_parallel.py",
        "torch_export.py",
    }
    assert _importers("torch.distributed") <= doors
    native = {path.name for path in SOURCES if '_native"' in path.read_text()}
    assert native == {"selection.py"}


OBJECT_COLLECTIVES = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""Of torch: they unpickle what comes over the network."""


def _runs_content(source: str) -> set[str]:
    """Return the calls and imports by which a file's content or a name could become code."""
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
    names, calls = set(), set()
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            said = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
            calls |= {called} & {
                "eval",
                "exec",
                "os.system",
                "os.popen",
                "torch.load",
                "__import__",
            }
            calls |= {called.rpartition(".")[2]} & OBJECT_COLLECTIVES
            calls |= {f"{name}=" for name in ("allow_pickle", "shell") if said.get(name) == "True"}
            calls |= {"trust_remote_code="} & {f"{k}=" for k, v in said.items() if v != "False"}
            if called == "torch.load" and said.get("weights_only") != "True":
                calls.add("torch.load without weights_only")
    return (names & modules) | calls


LOADS_TORCH = {"hf.py", "checkpoint_files.py", "scale.py", "safe_load.py", "torch_export.py"}
"""With weights_only: the Trainer's schedule, a rank's state, what a benchmark's ranks told; files
of other trainers, in a process of its own; a file that we have just laid out."""

READS_PICKLES = {"dcp_folder.py"}
"""Its unpickler resolves no name: tests/convert/test_foreign.py."""


def test_no_content_of_a_file_is_run() -> None:
    folders = ("offloadtrain", "tui", "benchmarks", "tools", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {path.name: what for path in paths if (what := _runs_content(path.read_text()))}
    assert {name for name, what in found.items() if what == {"pickle"}} == READS_PICKLES
    assert {name for name, what in found.items() if what == {"torch.load"}} == LOADS_TORCH
    assert set(found) == LOADS_TORCH | READS_PICKLES


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "dist.all_gather_object(found, value)",
        "from yaml import load",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_check_of_run_content_sees_it(code: str) -> None:
    assert _runs_content(code) - {"torch.load"}


def _documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_links_between_documents_lead_somewhere() -> None:
    dead = [
        f"{path.name}: {link}"
        for path in _documents()
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text())
        if "://" not in link and not (path.parent / link).exists()
    ]
    assert dead == []


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE} == {}


def test_functions_are_short() -> None:
    found = [
        f"{path.name} {line}"
        for path in SOURCES
        for line in _too_long(path.read_text(), LONGEST_FUNCTION)
    ]
    assert found == []


OPTIONS_OF_A_STEP = {
    *("grad_accum_steps", "clip_norm", "skip_nonfinite", "precision", "loss_scale_hysteresis"),
    *("update", "warmup_steps"),
}
"""Clipping, accumulation, loss scale and update mode: what no buffer says."""
OF_BUILDING = {"api.py", "build.py", "checks.py", "optimizer.py", "promotion.py", "weights.py"}
"""Files of `engine/` that make the layout and the engine from the options."""


def _options_read(source: str) -> set[str]:
    """Return the attributes of a `config` that are read."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "attr", getattr(node.value, "id", "")) in ("config", "_config")
    }


def test_the_program_and_the_engine_read_no_option_of_placement() -> None:
    """They see the buffer table, and the plain values that it does not hold."""
    program = sorted((ROOT / "offloadtrain/step/program").glob("*.py"))
    engine = sorted((ROOT / "offloadtrain/engine").glob("*.py"))
    autograd = sorted((ROOT / "offloadtrain/engine/autograd").glob("*.py"))
    read = {
        f"{path.name}: {option}"
        for path in (*program, *engine, *autograd)
        if path.name not in OF_BUILDING
        for option in _options_read(path.read_text()) - OPTIONS_OF_A_STEP
    }
    assert read == set()
    assert "working" in _options_read("x = spec.config.working")
    assert "activations" in _options_read("def f(config): return config.activations.mode")
