"""Widgets that draw all lines at once and cache them: only changed lines go to the terminal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from offloadtrain_tui.widgets.styles import PLAIN, shade, strip_of, styled

Content = TypeVar("Content")


class Drawn(Widget, Generic[Content]):
    """A widget that draws a value; equal ones look the same."""

    def __init__(self, content: Content, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._content = content
        self._strips: list[Strip] = []
        self._drawn: object = None
        self._look: tuple[object, ...] = ()
        self._strip_cache: dict[Hashable, Strip] = {}
        self._fresh: dict[Hashable, Strip] = {}
        self._colors: dict[str, str] = {}
        self._base = PLAIN
        self._width = self._height = 0  # of the drawn strips: `size` is computed on each call

    def draw(self, width: int, height: int) -> list[Strip]:
        """Return the lines from the top; missing ones are empty."""
        raise NotImplementedError

    def show(self, content: Content) -> None:
        """Redraw if the content has changed; only changed lines go to the terminal."""
        if content == self._content:
            return
        self._content = content
        before = self._strips
        self._bring_up()
        count = max(len(before), len(self._strips))
        changed = [y for y in range(count) if before[y : y + 1] != self._strips[y : y + 1]]
        if changed:
            self.refresh(*(Region(0, y, self._width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        self._bring_up()
        return self._strips[y] if y < len(self._strips) else self.strip(())

    def on_show(self) -> None:
        """Draw every line: lines that changed while the widget was hidden have not been drawn."""
        self.refresh()

    def strip(self, segments: Iterable[Segment]) -> Strip:
        """Return a line of the widget."""
        return strip_of(segments, self._width, self._base)

    def line(self, key: Hashable, make: Callable[[], Iterable[Segment]]) -> Strip:
        """Return a line of the widget; the one drawn last time if its key was the same."""
        strip = self._strip_cache.get(key)
        if strip is None:
            strip = self.strip(make())
        self._fresh[key] = strip
        return strip

    def style(self, color: str, *, bold: bool = False, dim: bool = False) -> Style:
        """Return a color of the theme as it is while the widget is drawn."""
        return styled(shade(self._colors, color), bold, dim)

    def _bring_up(self) -> None:
        """Draw if necessary."""
        look = (self.size, self.app.size, self.app.theme)
        if look != self._look:
            self._look, self._strip_cache, self._drawn = look, {}, None
            self._width, self._height = self.size
            self._colors, self._base = self.app.theme_variables, self.rich_style
        if self._drawn is not self._content:
            self._drawn, self._fresh = self._content, {}
            is_hidden = not (self._width and self._height)
            self._strips = [] if is_hidden else self.draw(self._width, self._height)
            self._strip_cache = self._fresh
