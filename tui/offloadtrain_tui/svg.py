"""Screenshots: SVG that all renderers draw alike, and PNG."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

from rich.cells import cell_len

from offloadtrain.config.errors import ConfigError

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_TEXT = re.compile(
    r'<text class="(\S+)" x="([\d.]+)" (y="\S+") textLength="\S+" (clip-path="\S+")>([^<]*)</text>'
)
_WORD = re.compile("( *)([\u2800-\u28ff]|[^\\s\u2800-\u28ff]+)")
"""Each braille character is a word, because the fallback font for braille has another width."""
_COLUMN = 12.2
"""Width of a character in Rich's SVG, in pixels."""
CONVERTER = "rsvg-convert"


def portable(svg: str) -> str:
    """Return Rich's SVG without web fonts, and with the position of every word.

    librsvg drops spaces at the ends of a text, and does not stretch a text to its `textLength`.
    """
    fonts = "font-family: 'Fira Code', 'DejaVu Sans Mono', Menlo, Consolas, monospace"
    svg = (
        _FONTS.sub("", svg)
        .replace("&#160;", " ")
        .replace("font-family: Fira Code, monospace", fonts)
    )
    return _TEXT.sub(_words, svg)


def _words(match: re.Match[str]) -> str:
    css, x, y, clip, text = match.groups()
    words = []
    for word in _WORD.finditer(text):
        column = cell_len(unescape(text[: word.start(2)]))
        at, length = float(x) + column * _COLUMN, cell_len(unescape(word[2])) * _COLUMN
        # The space has no effect on the picture, but is copied with the text.
        words.append(f'{word[1][:1]}<tspan x="{at:g}" textLength="{length:g}">{word[2]}</tspan>')
    return f'<text class="{css}" {y} {clip}>{"".join(words)} </text>' if words else ""


def write(path: Path, svg: str) -> None:
    """Write a picture, SVG or PNG by its name.

    Raises:
        ConfigError: the name has another suffix, or the conversion to PNG is impossible or fails.
    """
    if path.suffix == ".svg":
        path.write_text(svg)
        return
    if path.suffix != ".png":
        raise ConfigError(f"{path}: a picture's name ends in .svg or .png")
    if shutil.which(CONVERTER) is None:
        raise ConfigError(
            f"{path}: PNG needs {CONVERTER} (in librsvg2-bin): install it, or write .svg"
        )
    command = [CONVERTER, "--output", str(path)]
    done = subprocess.run(command, input=svg, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{path}: {done.stderr.strip()}")
