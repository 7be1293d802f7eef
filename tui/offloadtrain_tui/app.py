"""The monitor application: snapshots from a reader thread, one state, and a screen for each panel.

One `ViewState` determines the screen. It changes when the reader has news, every second, and when a
key is pressed; the visible panel then receives it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TextIO

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.filter import LineFilter
from textual.message import Message
from textual.notifications import SeverityLevel
from textual.screen import ModalScreen, Screen
from textual.theme import Theme
from textual.widgets import ContentSwitcher, Input, Static

from offloadtrain.boundary.safe_write import replace_file
from offloadtrain.events import control, schema
from offloadtrain_tui import settings
from offloadtrain_tui.clock import Clock, ReplayClock
from offloadtrain_tui.dialogs import Ask, Confirm, Page, record_page
from offloadtrain_tui.filter import Sanitized, is_unicode
from offloadtrain_tui.keys import COMMANDS, KEYS, PANELS, footer, help_page, with_keys
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.panels.events import EventsPanel
from offloadtrain_tui.panels.runs import RunsPanel, nothing_in
from offloadtrain_tui.plots import KINDS, as_csv
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.history import History
from offloadtrain_tui.reading.log_reader import NEWS_S, Listing, Reader, RunRow, Snapshot
from offloadtrain_tui.reading.runs import RunPath
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.summary import headline, numbers, when
from offloadtrain_tui.svg import portable
from offloadtrain_tui.text import clean
from offloadtrain_tui.this_machine import keep_sampling
from offloadtrain_tui.view_state import SPANS, ViewState
from offloadtrain_tui.web import end_without_server
from offloadtrain_tui.widgets.chart import Chart
from offloadtrain_tui.widgets.drawn import RUN_COLORS, STATE_COLORS
from offloadtrain_tui.widgets.table import tell

COLOR_BLIND = Theme(
    name="color-blind-safe",
    # The palette of Okabe and Ito (2008), distinguishable with any color vision.
    primary="#56B4E9",
    secondary="#CC79A7",
    accent="#E69F00",
    success="#009E73",
    warning="#F0E442",
    error="#D55E00",
    foreground="#E8E8E8",
    background="#101418",
    surface="#181C20",
    panel="#20262C",
    dark=True,
)

_CHARTS = ", ".join(KINDS)
RUNS_EVERY_S = 3.0
QUIET_S = 1.0
"""Interval between redraws without news, so that clocks advance, in seconds."""


@dataclass(slots=True)
class Watched:
    """The last known alerts and end of each run. Alerts and ends in the first complete reading are
    not news."""

    _known: dict[Path | None, frozenset[str]] = field(default_factory=dict)

    def news(self, snapshots: Sequence[Snapshot]) -> int:
        """Return the number of alerts that were raised and runs that ended since the last call."""
        count = 0
        for snapshot in (snapshot for snapshot in snapshots if snapshot.is_complete):
            codes = {alert.code for alert in snapshot.first.active_alerts()}
            signs = frozenset(codes | ({snapshot.state} & {*runs.ENDED}))
            count += len(signs - self._known.get(snapshot.folder, signs))
            self._known[snapshot.folder] = signs
        return count


class Monitor(App[None]):
    """Displays runs. It writes nothing except requests that the user makes."""

    class News(Message):
        """The reader has news. If several are in the queue, only the last one is handled."""

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, Monitor.News)

    @dataclass
    class Sampled(Message):
        """The machine was sampled."""

        system: schema.System

    @dataclass
    class Listed(Message):
        """The folder of runs was listed."""

        rows: list[RunRow]

    CSS_PATH = "monitor.tcss"
    TITLE = "offloadtrain"
    AUTO_FOCUS = ""  # otherwise a hidden table would get the keys
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = list(KEYS)

    def __init__(
        self,
        run_paths: list[RunPath],
        *,
        runs_dir: Path = Path("runs"),
        clock: Clock | None = None,
        readonly: bool = False,
        watch_machine: bool = True,
        news_s: float = NEWS_S,
        output: TextIO | None = None,
    ) -> None:
        """`news_s`: least interval between updates from the runs, in seconds. `output`: stream of
        the screen; None: the stream that Textual draws to."""
        super().__init__()
        self.register_theme(COLOR_BLIND)
        # CSS classes of the screen by its size.
        self.HORIZONTAL_BREAKPOINTS = [(0, "narrow"), (100, "medium"), (160, "wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "short"), (30, "usual"), (50, "tall")]
        self.clock = clock or Clock()
        named = tuple(run.folder for run in run_paths if run.folder is not None)
        self._listing = Listing(runs_dir, named)
        self.reader = Reader(
            run_paths, self.clock, lambda: self.post_message(self.News()), news_s=news_s
        )
        self._selected = 0
        self._overlaid = set(named) if len(run_paths) > 1 else set()
        watches = watch_machine and not isinstance(self.clock, ReplayClock)
        self._stop_sampling = threading.Event() if watches else None
        self._watched = Watched()
        self.settings = settings.DEFAULTS
        self._sanitized = Sanitized(ascii_only=not is_unicode(output))
        self.first_panel = "overview"
        self._listed = False
        name, state = (run_paths[0].name, "opening") if run_paths else (nothing_in(runs_dir), "")
        empty = Snapshot(name, None, (View.at(History()),), state)
        self.shown = ViewState(empty, self.clock.now_s(), readonly=readonly)

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._sanitized]

    def use(self, chosen: settings.Settings) -> None:
        """Apply the user's settings."""
        self.settings = chosen
        self.shown = replace(self.shown, log=chosen.log_axis, span=chosen.mean)
        if chosen.theme:
            self.call_later(setattr, self, "theme", chosen.theme)

    # ---- life

    def on_mount(self) -> None:
        self.reader.start()
        if self._stop_sampling is not None:
            work = lambda system: self.post_message(self.Sampled(system)), self._stop_sampling
            threading.Thread(target=keep_sampling, args=work, daemon=True).start()
        replay = isinstance(self.clock, ReplayClock)
        self._quiet = self.set_interval(0.25 if replay else QUIET_S, self.settle)
        self.set_interval(RUNS_EVERY_S, self._look_for_runs)
        if self.is_web:
            self.set_interval(RUNS_EVERY_S, end_without_server)
        self._look_for_runs()
        if self.first_panel != "overview":
            self.action_panel(self.first_panel)

    def on_unmount(self) -> None:
        self.reader.close()
        if self._stop_sampling is not None:
            self._stop_sampling.set()

    # ---- news

    def on_monitor_news(self) -> None:
        self.settle()
        self._quiet.reset()  # clocks and ages were just drawn

    def on_monitor_sampled(self, message: Monitor.Sampled) -> None:
        self.shown = replace(self.shown, machine=message.system)  # shown at the next tick

    def on_monitor_listed(self, message: Monitor.Listed) -> None:
        self._listed = True
        if not self.is_running:
            return
        self.query_one(RunsPanel).list_runs(message.rows, self._listing.runs_dir)
        living = [row.folder for row in message.rows if row.state in runs.ALIVE]
        if not self.reader.readers and living:  # a run started after the monitor, which had none
            self._open(living[0], overlay=False)

    @property
    def is_settled(self) -> bool:
        """True if everything present at the start has been read, and the screen is complete."""
        sampled = self.shown.machine is not None or self._stop_sampling is None
        logs = not self.reader.readers or (
            bool(self.reader.snapshots)
            and all(snapshot.is_complete for snapshot in self.reader.snapshots)
        )
        return self._listed and sampled and logs

    def _look_for_runs(self) -> None:
        """List runs on another thread, because a hundred runs on a slow disk take time."""

        def look() -> None:
            self.post_message(self.Listed(self._listing.rows(self.clock.now_s())))

        self.run_worker(look, thread=True, exclusive=True, group="runs", exit_on_error=False)

    def action_attention(self) -> None:
        how: settings.Attention = "off" if self.settings.attention == "bell" else "bell"
        self.settings = replace(self.settings, attention=how)
        self.tell(f"at an alert and at the end: {'a bell' if how == 'bell' else 'nothing'}")

    def action_save_settings(self) -> None:
        """Save the theme, the chart settings and the attention setting."""
        theme, log, mean = self.theme, self.shown.log, self.shown.span
        chosen = replace(self.settings, theme=theme, log_axis=log, mean=mean)
        try:
            settings.save(settings.path(), chosen)
        except OSError as error:
            self.tell(f"{settings.path()} cannot be written: {error.strerror}", "error")
        else:
            self.tell(f"saved {settings.path()}")

    def settle(self) -> None:
        """Draw the newest state."""
        snapshots, now_s = self.reader.snapshots, self.clock.now_s()
        shown = replace(self.shown, now_s=now_s)
        if isinstance(self.clock, ReplayClock):
            shown = replace(shown, at_s=now_s, speed=self.clock.speed)
        elif self._watched.news(snapshots) and self.settings.attention == "bell":
            self.bell()
        if snapshots:
            self._selected = min(self._selected, len(snapshots) - 1)
            chosen = snapshots[self._selected]
            other_runs = tuple(
                snapshot
                for snapshot in snapshots
                if snapshot is not chosen
                and (snapshot.folder is None or snapshot.folder in self._overlaid)
            )
            shown = replace(shown, snapshot=chosen, other_runs=other_runs)
        self.change(shown)

    # ---- the screen

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        yield Static(id="numbers")
        yield Static(id="when")
        with ContentSwitcher(initial="overview", id="panels"):
            for name, panel in PANELS.items():
                yield panel(id=name)
        yield Static(id="footer")

    def tell(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a notice for a moment; the text is not parsed as markup."""
        self.notify(clean(text, 300), severity=severity, markup=False)

    def draw(self) -> None:
        if not self.is_running:  # at exit widgets are removed one by one while timers still fire
            return
        names = STATE_COLORS | {color: color for color in RUN_COLORS}
        colors = {key: self.panel.ink(name) for key, name in names.items()}
        with self.batch_update():
            lines = {
                "headline": headline(self.shown, colors, self.size.width),
                "numbers": numbers(self.shown, self.size.width),
                "when": when(self.shown, colors, self.size.width),
            }
            self.query_one("#when").display = bool(lines["when"].plain)
            self.panel.show(self.shown)
            # The screen's active bindings would change with the focus.
            bindings = [
                (self.get_key_display(binding), binding)
                for bindings_map in (self.panel._bindings, self._bindings)
                for _, binding in bindings_map
            ]
            can_ask = self.shown.snapshot.state in runs.ALIVE and not self.shown.readonly
            lines["footer"] = footer(bindings, self.size.width, can_ask=can_ask)
            for name, text in lines.items():
                tell(self.query_one(f"#{name}", Static), text)

    @property
    def panel(self) -> Panel:
        switcher = self.query_one(ContentSwitcher)
        return switcher.query_one(f"#{switcher.current}", Panel)

    def change(self, shown: ViewState) -> None:
        self.shown = shown
        self.draw()

    # ---- keys

    def action_panel(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name
        self.draw()
        focusable = self.panel.query("DataTable, VerticalScroll")
        if self.panel.can_focus:
            self.panel.focus()
        elif focusable:
            focusable.first().focus()
        else:
            self.set_focus(None)

    def action_help(self) -> None:
        self.push_screen(Page(help_page(self.shown.view.start)))

    def _ask(self, dialog: Ask | Confirm, act: Callable[[str], None]) -> None:
        """Ask the user, and call `act` with a non-empty answer."""
        self.push_screen(dialog, lambda answer: None if not answer else act(answer))

    def action_step(self) -> None:
        self._ask(Ask("go to step"), self._go_to_step)

    def _go_to_step(self, answer: str) -> None:
        view = self.shown.newest
        numbers = view.history.steps.values[: view.length]
        if numbers and answer.strip().isdigit():
            step = int(answer)
            nearest = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - step), -i))
            self._go_to(replace(self.shown, cursor=nearest))

    def action_zoom(self, by: int) -> None:
        self.change(self.shown.zoomed(by))

    def action_log_axis(self) -> None:
        self.change(replace(self.shown, log=not self.shown.log))

    def action_mean(self) -> None:
        span = (
            SPANS[(SPANS.index(self.shown.span) + 1) % len(SPANS)]
            if self.shown.span in SPANS
            else 0
        )
        self.change(replace(self.shown, span=span))
        self.tell(f"moving average over {span} steps" if span else "no moving average")

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """Return the screen as SVG that all renderers draw alike."""
        return portable(super().export_screenshot(title=title, simplify=simplify))

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        if self.is_web:
            self.deliver_screenshot()  # the browser's user cannot open this folder
        else:
            self.tell(f"saved {self.save_screenshot(filename, path)}")

    def action_move(self, by: int) -> None:
        self._go_to(self.shown.moved(by))

    def action_jump(self, direction: int) -> None:
        self._go_to(self.shown.jumped(direction))

    def _go_to(self, shown: ViewState) -> None:
        """Move to another moment; a replay continues from it."""
        if not isinstance(self.clock, ReplayClock):
            self.change(shown)
            return
        moment = shown.moment_s
        self.clock.move(self.clock.end_s if shown.cursor is None or moment is None else moment)
        self.settle()

    def action_live(self) -> None:
        self._go_to(replace(self.shown, cursor=None))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the priority of the End key in a text field or a dialog, which handle it
        themselves."""
        if action == "live":
            return not isinstance(self.focused, Input) and not isinstance(self.screen, ModalScreen)
        return True

    def action_pause(self) -> None:
        """Pause a replay, or hold a live run at its newest step."""
        if isinstance(self.clock, ReplayClock):
            self.clock.pause(not self.clock.paused)
        elif self.shown.cursor is not None:
            self.action_live()
        elif self.shown.newest.length:
            self.change(replace(self.shown, cursor=self.shown.newest.length - 1))

    def action_next_run(self) -> None:
        if snapshots := self.reader.snapshots:
            self._selected = (self._selected + 1) % len(snapshots)
            self.shown = replace(self.shown, cursor=None)
            self.settle()

    # ---- from the panels

    def on_chart_picked(self, message: Chart.Picked) -> None:
        """Move the cursor of the whole screen to the clicked position."""
        self._go_to(replace(self.shown, cursor=message.position))

    def on_events_panel_chosen(self, message: EventsPanel.Chosen) -> None:
        if message.jump:
            self.change(self.shown.to_time(message.moment.time_s))
        else:
            self.push_screen(record_page(message.moment))

    def on_runs_panel_chosen(self, message: RunsPanel.Chosen) -> None:
        self._open(message.folder, overlay=message.overlay)

    def _open(self, folder: Path, *, overlay: bool) -> None:
        if overlay:
            self._overlaid ^= {folder}
        self.reader.add(runs.open_run(folder))
        if not overlay:
            folders = [reader.run.folder for reader in self.reader.readers]
            self._selected = folders.index(folder)
            self.reader.publish()
            self.shown = replace(self.shown, cursor=None)
            self.action_panel("overview")
        self.settle()

    # ---- requests to a run, confirmed by the user

    def action_checkpoint(self) -> None:
        self._request("save a checkpoint after this step?", {"checkpoint": "save"})

    def action_stop(self) -> None:
        choices = {"stop": "stop after this step, with a checkpoint", "abort": "abort, without"}
        self._request("end the run?", choices)

    def action_note(self) -> None:
        if folder := self._folder_to_ask():
            self._ask(Ask("a note for the run's log"), partial(self._send, folder, "note"))

    def action_acknowledge(self) -> None:
        alerts = self.shown.view.active_alerts()
        if alerts and (folder := self._folder_to_ask()):
            self._send(folder, "acknowledge", alerts[-1].code)

    def _request(self, question: str, choices: dict[str, str]) -> None:
        if folder := self._folder_to_ask():
            dialog = Confirm(f"{self.shown.snapshot.name}: {question}", choices)
            self._ask(dialog, partial(self._send, folder))

    def _folder_to_ask(self) -> Path | None:
        """Return the folder of the run, if it answers requests; else say why it does not."""
        snapshot = self.shown.snapshot
        if self.shown.readonly:
            self.tell("--readonly: requests are disabled", "warning")
        elif snapshot.folder is None or snapshot.state not in runs.ALIVE:
            self.tell(f"the run is not running ({snapshot.state})", "warning")
        else:
            return snapshot.folder
        return None

    def _send(self, folder: Path, action: str, message: str = "") -> None:
        try:
            control.send(folder, action, message)
        except control.RequestError as error:
            self.tell(str(error), "error")
        else:
            self.tell(f"{action}: requested; the answer appears as an event")

    # ---- exports

    def action_export(self) -> None:
        """Export the sampled steps as a Chrome trace, with the trace command."""
        folder = self.shown.snapshot.folder
        if folder is None or self.shown.readonly:
            why = "--readonly: nothing is written" if folder else "only run folders are exported"
            self.tell(why, "warning")
            return

        def export() -> None:
            command = [sys.executable, "-m", "offloadtrain", "trace", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                self.call_from_thread(self.tell, done.stderr.strip(), "error")
            else:
                self.call_from_thread(self.tell, f"{done.stdout.strip()}: for ui.perfetto.dev")

        self.run_worker(export, thread=True, group="export", exit_on_error=False)

    def action_chart_file(self) -> None:
        question = f"write a chart's numbers, such as loss.csv, or copy them, as loss: {_CHARTS}"
        self._ask(Ask(question), self._export_chart)

    def _export_chart(self, answer: str) -> None:
        """Write a chart's numbers to a file that is named like the chart. If the answer is only a
        chart's name, copy them to the terminal's clipboard, by OSC 52."""
        path = Path(answer).expanduser()
        if answer in KINDS:
            self.copy_to_clipboard(as_csv(answer, self.shown))
            self.tell(f"{answer}: copied as CSV, if the terminal allows it")
        elif path.stem not in KINDS or path.suffix != ".csv":
            self.tell(f"{path.name}: give a chart's name, or that and .csv: {_CHARTS}", "warning")
        elif self.shown.readonly:
            self.tell("--readonly: nothing is written", "warning")
        elif path.exists():
            self.tell(f"{path} exists: it is left as it is", "warning")
        else:
            try:
                replace_file(path, as_csv(path.stem, self.shown))
            except OSError as error:
                self.tell(f"{path} cannot be written: {error.strerror}", "error")
            else:
                self.tell(f"saved {path.absolute()}")

    # ---- the command palette

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for key, name in with_keys(PANELS):
            title = f"Screen {key}: {name}" if key else f"Screen: {name}"
            yield SystemCommand(title, "", lambda name=name: self.action_panel(name))
        for title, action in COMMANDS:
            yield SystemCommand(title, "", getattr(self, f"action_{action}"))
