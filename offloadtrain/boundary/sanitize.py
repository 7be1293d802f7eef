"""Makes foreign text harmless: it must not control a terminal or mislead a reader.

Names, messages, paths and logs may contain escape sequences that write the clipboard, set the title
or clear the screen, and marks that reverse or hide text. Python's `str.isprintable` decides
alone. It is false for C0, DEL, C1, line and paragraph separators, bidirectional
controls, zero-width and other format characters, surrogates, and unassigned characters.
"""

from __future__ import annotations

import unicodedata
from typing import TextIO

_SHOWN_AS = "\N{REPLACEMENT CHARACTER}"
_LINES_AND_TABS = "\n\t"
_JSON_SPACE = "\n\t\r"


def sanitize(text: str) -> str:
    """Return the text with unprintable characters replaced, except newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        character if character in _LINES_AND_TABS else _shown(character) for character in text
    )


def one_line(text: str) -> str:
    """Return the text as one line: as `sanitize`, with newlines and tabs as blanks."""
    if text.isprintable():
        return text
    return "".join(" " if character in _LINES_AND_TABS else _shown(character) for character in text)


def sanitize_json(text: str) -> str:
    """Return the same JSON on one line, with unprintable characters escaped; nothing is lost."""
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
    """Escape a character; outside of strings, white space is JSON's only unprintable character."""
    if character in _JSON_SPACE:
        return " "
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


class SanitizedStream:
    """A text stream that removes escape sequences; other attributes are those of the stream.

    `isatty` is False: a program that draws uses `unfiltered`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        clean = sanitize(text)
        try:
            return self._stream.write(clean)
        except UnicodeEncodeError:  # a locale without UTF-8; Python's stderr does the same
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
    """Return the stream itself, for the program's own escape sequences, such as a live line."""
    return stream._stream if isinstance(stream, SanitizedStream) else stream
