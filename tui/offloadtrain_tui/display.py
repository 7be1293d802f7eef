"""The monitor's screen: its widgets, and how one `ViewState` determines it."""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text
from textual.app import App, ComposeResult
from textual.notifications import SeverityLevel
from textual.widgets import ContentSwitcher, Footer, Static

from offloadtrain_tui.dialogs import Ask
from offloadtrain_tui.help import Help
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.panels.events import EventsPanel
from offloadtrain_tui.panels.gpus import Gpus
from offloadtrain_tui.panels.job import JobPanel
from offloadtrain_tui.panels.memory import MemoryPanel
from offloadtrain_tui.panels.overview import Overview
from offloadtrain_tui.panels.plots import PlotsPanel
from offloadtrain_tui.panels.ranks import Ranks
from offloadtrain_tui.panels.runs import RunsPanel
from offloadtrain_tui.panels.timeline import TimelinePanel
from offloadtrain_tui.panels.transfers import Transfers
from offloadtrain_tui.summary import headline, numbers, when
from offloadtrain_tui.text import clean
from offloadtrain_tui.view_state import SPANS, ViewState
from offloadtrain_tui.widgets.styles import STATE_COLORS, rich_color, shade
from offloadtrain_tui.widgets.tell import tell

PANELS: dict[str, type[Panel]] = {
    "overview": Overview,
    "memory": MemoryPanel,
    "transfers": Transfers,
    "timeline": TimelinePanel,
    "plots": PlotsPanel,
    "ranks": Ranks,
    "events": EventsPanel,
    "job": JobPanel,
    "runs": RunsPanel,
    "gpus": Gpus,
}


WIDE, NARROW, SHORT, TALL = 160, 100, 30, 50


class Display(App[None]):
    """Draws the `ViewState` for the `Monitor`, and changes the parts that the user chooses."""

    CSS_PATH = "monitor.tcss"
    shown: ViewState

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        yield Static(id="numbers")
        yield Static(id="when")
        with ContentSwitcher(initial="overview", id="panels"):
            for name, panel in PANELS.items():
                yield panel(id=name)
        yield Footer(compact=True, show_command_palette=False)  # `?` names its key

    def on_resize(self) -> None:
        width, height = self.size
        self.screen.set_class(width >= WIDE, "wide")
        self.screen.set_class(width < NARROW, "narrow")
        self.screen.set_class(height < SHORT, "short")
        self.screen.set_class(height >= TALL, "tall")

    def tell(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a notice for a moment; names and messages in it are no markup."""
        self.notify(clean(text, 300), severity=severity, markup=False)

    def draw(self) -> None:
        if not self.is_running:  # it is ending: widgets are removed one by one, timers still fire
            return
        variables = self.theme_variables
        colors = {state: rich_color(shade(variables, name)) for state, name in STATE_COLORS.items()}
        with self.batch_update():
            self._line("headline", headline(self.shown, colors, self.size.width))
            self._line("numbers", numbers(self.shown, self.size.width))
            text = when(self.shown, colors)
            self.query_one("#when").display = bool(text.plain)
            self._line("when", text)
            self.panel.show(self.shown)

    def _line(self, name: str, text: Text) -> None:
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
        self.push_screen(Help())

    def action_step(self) -> None:
        def go(answer: str | None) -> None:
            view = self.shown.newest
            numbers = view.history.steps.values[: view.length]
            if numbers and answer and answer.strip().isdigit():
                step = int(answer)
                nearest = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - step), -i))
                self.change(replace(self.shown, cursor=nearest))

        self.push_screen(Ask("go to step"), go)

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

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        if self.is_web:
            self.deliver_screenshot()  # to the browser: the folder here is not its user's
        else:
            self.tell(f"saved {self.save_screenshot(filename, path)}")
