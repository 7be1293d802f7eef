"""One rule for every output: what is unprintable reaches no terminal."""

from __future__ import annotations

import errno
import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.boundary.output import sanitized_output, say_on_stderr
from offloadtrain.boundary.sanitize import (
    one_line,
    sanitize,
    sanitize_json,
    unfiltered,
)

UNPRINTABLE = [
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *map(chr, range(0x200B, 0x2010)),  # zero width, and marks of direction
    *map(chr, range(0x2028, 0x202F)),  # line and paragraph separators, bidirectional controls
    *map(chr, range(0x2060, 0x2070)),
    "\u00ad",
    "\u061c",
    "\ufeff",
    "\ufff9",
    "\ud800",
    "\U000e0041",  # a tag
    "\U0010fffd",  # of private use
]


@pytest.mark.slow
@given(st.text(st.characters()))
def test_what_is_printable_stays_and_what_is_not_goes(text: str) -> None:
    clean = sanitize(text)
    assert all(item.isprintable() or item in "\n\t" for item in clean) and len(clean) == len(text)
    assert sanitize(clean) == clean and one_line(text).isprintable()
    if text.isprintable():
        assert clean == text


def test_a_locale_without_utf8_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1", newline=""))
    with sanitized_output():
        print("größe 長\x1b[2J", flush=True)
    assert raw.getvalue() == "größe \\u9577\\ufffd[2J\n".encode("latin-1")


def test_each_character_that_a_terminal_obeys_is_replaced() -> None:
    passed = [item for item in UNPRINTABLE if item in sanitize(f"a{item}b") and item not in "\n\t"]
    assert passed == []
    assert [item for item in UNPRINTABLE if not one_line(f"a{item}b").isprintable()] == []


def test_lines_tabs_letters_and_wide_blanks_stay() -> None:
    assert sanitize("def f():\n\treturn 1\n") == "def f():\n\treturn 1\n"
    assert sanitize("größe 長さ 🚀\n") == "größe 長さ 🚀\n"
    assert sanitize("a\u00a0b\n") == "a b\n"


@pytest.mark.slow
@given(st.recursive(st.text(st.characters()) | st.integers(), lambda x: st.lists(x)))
def test_json_says_the_same_with_escapes(value: object) -> None:
    for text in (json.dumps(value, ensure_ascii=False, indent=1), json.dumps(value)):
        shown = sanitize_json(text)
        assert shown.isprintable() and json.loads(shown) == value


def test_whatever_is_printed_is_filtered_and_the_streams_come_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout, sys.stderr
    with sanitized_output(), sanitized_output():
        print("a\x1b]52;c;AAAA\x07b")
        print("\x9b2J", file=sys.stderr)
        sys.stdout.writelines(["\u202e", "\n"])
        assert not sys.stdout.isatty() and unfiltered(sys.stdout) is before[0]
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert out.replace("\n", "").isprintable() and err[:-1].isprintable()


def test_a_lost_message_does_not_end_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that is full for a while."""
    lines: list[str] = []

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if not lines:
                lines.append("lost")
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

        def fileno(self) -> int:
            raise AssertionError("the descriptor stays as it is")

    stream = Full()
    monkeypatch.setattr(sys, "stderr", stream)
    say_on_stderr("first")
    say_on_stderr("second")
    assert stream.getvalue() == "second\n"
