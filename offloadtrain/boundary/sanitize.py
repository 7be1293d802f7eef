"""Make text from elsewhere harmless: it must control no terminal and mislead no reader.

Names, messages, paths and logs may hold escape sequences that write the clipboard, set the title or
clear the screen, and marks that reverse or hide text. One rule decides, and it is Python's own:
`str.isprintable`. It is false for C0, DEL, C1, line and paragraph separators, bidirectional
controls, zero-width and other format characters, surrogates, and characters of no known meaning.
"""

from __future__ import annotations

import unicodedata
from typing import TextIO

_SHOWN_AS = "\N{REPLACEMENT CHARACTER}"
_LINES_AND_TABS = "\n\t"
_JSON_SPACE = "\n\t\r"


def sanitize(text: str) -> str:
    """Return the text with everything unprintable replaced but newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        character if character in _LINES_AND_TABS else _shown(character) for character in text
    )


def one_line(text: str) -> str:
    """Return the text as one line: newlines and tabs are blanks too."""
    if text.isprintable():
        return text
    return "".join(" " if character in _LINES_AND_TABS else _shown(character) for character in text)


def sanitize_json(text: str) -> str:
    """Return the same JSON on one line, with unprintable characters escaped: nothing is lost."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else _escaped(character) for character in text
    )


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if unicodedata.category(character) == "Zs" else _SHOWN_AS


def _escaped(character: str) -> str:
    """Outside a string, JSON has no unprintable characters but white space."""
    if character in _JSON_SPACE:
        return " "
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


class SanitizedStream:
    """A text stream that removes escape sequences; everything else is passed to the stream.

    `isatty` is False: a program that draws uses `unfiltered`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        clean = sanitize(text)
        try:
            return self._stream.write(clean)
        except UnicodeEncodeError:  # of a locale without UTF-8; Python's stderr does the same
            encoding = self._stream.encoding
            return self._stream.write(clean.encode(encoding, "backslashreplace").decode(encoding))

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream itself, for the escape sequences of our own: a line that is redrawn."""
    return stream._stream if isinstance(stream, SanitizedStream) else stream
