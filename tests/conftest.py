"""One torch thread everywhere: small shapes gain nothing, and bits depend on the count."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

# cuBLAS reads it once in a process, at its first product, and only with it repeats its bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what tests train is built, never fetched

import pytest
from hypothesis import HealthCheck, settings

from tests import levels

# Hypothesis fails a test of which a case takes more than 200 ms, or whose cases take long to draw:
# both happen on a busy machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

GARBAGE_EVERY = 10_000
"""Objects that are made between two collections of garbage. Python's 700, which level full keeps,
take a tenth of the time of the tests."""


@pytest.fixture(scope="session", autouse=True)
def no_memory_of_earlier_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor of the user's own token files: what was verified is remembered for this session."""
    os.environ["OFFLOADTRAIN_CACHE"] = str(tmp_path_factory.mktemp("cache"))


class Printed(NamedTuple):
    """What a command has written."""

    out: str
    err: str


class Command(Protocol):
    def __call__(self, *arguments: object, code: int = 0) -> Printed: ...


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `offloadtrain` with these arguments in this process, checks its
    exit code, and returns what it has printed since the last look."""
    from offloadtrain.cli.main import main

    def run(*arguments: object, code: int = 0) -> Printed:
        returned = main([*map(str, arguments)])
        printed = Printed(*capsys.readouterr())
        assert returned == code, printed.err
        return printed

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--level", choices=["quick", "rest", "full"], help="tests/levels.py")
    parser.addoption("--seed", type=int, help="of the cases that are drawn; printed at the start")


def pytest_configure(config: pytest.Config) -> None:
    # Tests send these, to commands that they start too: what nohup, or a shell behind `&`, has
    # ignored would be ignored there.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    option = config.option
    if option.level is None:
        named = any("::" in arg for arg in config.args)  # who names one case wants that one
        option.level = "full" if named or "gpu" in option.markexpr else "quick"
    if option.seed is None:
        own = random.SystemRandom().randrange(10**6)
        option.seed = getattr(config, "workerinput", {}).get("seed", own)
    levels.choose(option.level)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of pytest-xdist read the command line again: a seed that is not there is sent."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"level {config.option.level}, cases drawn by --seed {config.option.seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = levels.selected(items, config.option.level, config.option.seed)
    if find_spec("torch") is not None:
        from tests import drawn_lanes  # here: the tests of the monitor run where torch is missing

        drawn_lanes.draw(kept, config.option.seed)
    _one_thread()
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted(kept, key=_without_pools)


def _one_thread() -> None:
    """Set torch's threads. The tests of the ground and of the monitor run without torch."""
    if find_spec("torch") is None:
        return
    import torch  # here: the process that only hands out tests does not wait for it

    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test marked `gpu` runs on the CPU where there is no GPU: `tests/gpu/stand_in.py`."""
    mark = item.get_closest_marker("gpu")
    if mark is None:
        return (yield)
    from tests.gpu.precision import HAS_GPU
    from tests.gpu.stand_in import stand_in

    if HAS_GPU:
        return (yield)
    with stand_in(mark.kwargs.get("until")):
        return (yield)


def _without_pools(item: pytest.Item) -> bool:
    """Tests of ranks come first: the first of pytest-xdist's workers gets them all, so that their
    processes are there once, while the other one runs what waits for nobody."""
    return "pools" not in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a module of tests has imported is here to stay, too: torch's compiler is half a million
    objects, and Trainer collects garbage after each training."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Modules are here to stay: no collection of garbage looks at them, neither while they are
    imported nor during a test."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    if session.config.option.level != "full":
        gc.set_threshold(GARBAGE_EVERY)
    return found
