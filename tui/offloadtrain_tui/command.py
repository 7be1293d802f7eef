"""The command `offloadtrain tui`. The monitor is imported inside of it, because Textual is slow."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from offloadtrain.boundary.sanitize import unfiltered
from offloadtrain.config.errors import ConfigError
from offloadtrain_tui import settings
from offloadtrain_tui.clock import Clock, ReplayClock
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.log_reader import NEWS_OVER_SSH_S, NEWS_S, RunReader

if TYPE_CHECKING:
    from offloadtrain_tui.app import Monitor

ONCE_SIZE = (120, 40)


def tui(
    run: Annotated[list[Path] | None, Parameter(negative="")] = None,
    /,
    *,
    runs_dir: Path = Path("runs"),
    once: Annotated[bool, Parameter(negative="")] = False,
    screenshot: Path | None = None,
    replay: Annotated[bool, Parameter(negative="")] = False,
    speed: float = 8.0,
    readonly: Annotated[bool, Parameter(negative="")] = False,
    screen: str = "overview",
    theme: str = "",
    size: str = "",
    web: Annotated[bool, Parameter(negative="")] = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_requests: Annotated[bool, Parameter(negative="")] = False,
    tabs: Annotated[int, Parameter(validator=Number(gte=1))] = 4,
) -> int:
    """Monitor runs: the newest by default, finished ones too, and several at once.

    Without a run, show this machine and its GPUs. Keys: 1-9 screens, [ ] steps, { } marks, End
    live, c checkpoint, S stop, ? help, q quit.

    Parameters
    ----------
    run
        Run folders, folders of runs (selects the newest), or event files.
    runs_dir
        Folder listed on the runs screen.
    once
        Print one frame and exit.
    screenshot
        Write one frame as FILE.svg, or with rsvg-convert (librsvg) as FILE.png, and exit.
    replay
        Replay a run from its beginning.
    speed
        Speed of a replay, relative to the run.
    readonly
        Disable requests to the run.
    screen
        Initial screen: overview, memory, transfers, timeline, plots, ranks, events, job, runs or
        gpus.
    theme
        A Textual theme, "color-blind-safe", or "ansi-dark" for the terminal's own colors.
    size
        Size of the frame for --once and --screenshot, such as 160x45.
    web
        Show the monitor in a browser, read-only. Needs `pip install 'offloadtrain[web]'`.
    host
        Address for --web. Whoever reaches it sees the runs: there is no password.
    port
        Port for --web.
    allow_requests
        With --web: allow requests to the run, as in a terminal.
    tabs
        Most browser tabs of --web that are open at a time. Each is a process of about 50 MiB.
    """
    from offloadtrain_tui.app import Monitor
    from offloadtrain_tui.keys import PANELS

    if screen not in PANELS:
        raise ConfigError(f"--screen {screen}: choose one of {', '.join(PANELS)}")
    run_paths = runs.find(run or [], runs_dir)
    if replay and not run_paths:
        raise ConfigError("--replay: there is no run to replay")
    if allow_requests and not web:
        raise ConfigError(
            "--allow-requests is for --web: a terminal allows them without --readonly"
        )
    if web:
        options = {"--speed": speed, "--screen": screen, "--theme": theme}
        flags = {"--replay": replay, "--readonly": readonly or not allow_requests}
        from offloadtrain_tui.web import serve

        named = [str(path.path) for path in run_paths] if run else []
        return serve(host, port, named, options | {"--runs-dir": runs_dir.resolve()}, flags, tabs)
    clock = Clock()
    if replay:
        history = RunReader(run_paths[0]).read_to_end(clock.now_s()).first.history
        clock = ReplayClock(history.first_time_s, history.last_time_s, speed=speed)
    news_s = NEWS_OVER_SSH_S if os.environ.get("SSH_CONNECTION") else NEWS_S
    app = Monitor(
        run_paths,
        runs_dir=runs_dir,
        clock=clock,
        readonly=readonly,
        news_s=news_s,
        output=unfiltered(sys.stdout) if once else None,
    )
    is_frame = once or screenshot is not None
    app.use(_settings(app, theme, of_user=not is_frame))
    if is_frame:
        _frame(app, screen, size, screenshot)
        return 0
    return _in_terminal(app, screen)


def _settings(app: Monitor, theme: str, *, of_user: bool) -> settings.Settings:
    """Return the user's settings or the defaults, with this theme; raise ConfigError if invalid."""
    file, themes = settings.path(), sorted(app.available_themes)
    if theme and theme not in themes:
        raise ConfigError(f"--theme {theme}: choose one of {', '.join(themes)}")
    try:
        chosen = settings.load(file, themes) if of_user else settings.DEFAULTS
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    return replace(chosen, theme=theme or chosen.theme)


def _frame(app: Monitor, screen: str, size: str, screenshot: Path | None) -> None:
    """Print one frame, or write it as a picture."""
    from offloadtrain_tui.pictures import frame
    from offloadtrain_tui.svg import write

    width, height = _parsed(size)
    terminal = unfiltered(sys.stderr)  # Textual redirects stderr while it draws

    def say(text: str) -> None:
        if terminal.isatty():
            terminal.write(f"... {text}\n")
            terminal.flush()

    text, svg = asyncio.run(frame(app, screen, width, height, say))
    if screenshot is not None:
        write(screenshot, svg)
        print(screenshot)
    else:
        print(text)
    # If the frame shows no run, stderr says why.
    if app.shown.snapshot.problem and not app.shown.snapshot.has_records:
        raise ConfigError(f"{app.shown.snapshot.name}: {app.shown.snapshot.problem}")


def _in_terminal(app: Monitor, screen: str) -> int:
    drawn_elsewhere = bool(os.environ.get("TEXTUAL_DRIVER"))  # in a browser, by textual-serve
    terminals = (unfiltered(sys.stdout), unfiltered(sys.stderr))  # Textual draws to stderr
    if not drawn_elsewhere and not all(terminal.isatty() for terminal in terminals):
        raise ConfigError(
            "stdout or stderr is not a terminal: use --once, --screenshot, or `offloadtrain status`"
        )
    app.first_panel = screen
    app.run()
    return app.return_code or 0


def _parsed(size: str) -> tuple[int, int]:
    if not size:
        return ONCE_SIZE
    width, _, height = size.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise ConfigError(f"--size {size}: give columns and lines, such as 160x45")
    return min(max(int(width), 40), 400), min(max(int(height), 12), 200)
