"""Detection of files that are not text, by their first bytes or by bytes that text does not
contain."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.data.source import SourceFile
from offloadtrain.data.tokens import DataError

_HEAD_BYTES = 1 << 16
_JUDGED_BYTES = 1 << 10
"""Shorter files are not judged: a short text may contain any byte."""

_MOST_ZEROS, _MOST_CONTROLS = 0.01, 0.05
"""Shares. Bytes of no encoding of text (compressed ones, say) are 11 % controls."""

_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b\b")) + b"\x7f"

_TO_TEXT = 'write its texts as JSONL, one {"text": ...} per line'
_UNPACK = "unpack it first"

# (offset, bytes there, file type, remedy)
_KNOWN = [
    (0, b"PAR1", "a Parquet file", "give it the ending .parquet"),
    (0, b"ARROW1", "an Arrow file", "give it the ending .arrow"),
    (0, b"SQLite format 3\0", "an SQLite database", _TO_TEXT),
    (0, b"\x89HDF\r\n", "an HDF5 file", _TO_TEXT),
    (0, b"\x93NUMPY", "a NumPy array", _TO_TEXT),
    (0, b"%PDF-", "a PDF document", "extract its text"),
    (0, b"\x1f\x8b", "compressed by gzip", _UNPACK),
    (0, b"BZh", "compressed by bzip2", _UNPACK),
    (0, b"\xfd7zXZ\0", "compressed by xz", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK),
    (0, b"PK\x03\x04", "a zip archive (such as .docx and .epub)", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"\x89PNG\r\n", "a PNG image", "leave it out"),
    (0, b"\xff\xd8\xff", "a JPEG image", "leave it out"),
    (0, b"GGUF", "a file of weights (GGUF)", "leave it out"),
    (0, b"\x7fELF", "a program", "leave it out"),
    (0, b"OTTOKENS", "a token file", "set data.train to it"),
]


def refuse_binary(files: Sequence[SourceFile]) -> None:
    """Raises DataError for files that are not text; other tables than CSV are judged when they are
    read."""
    texts = [file for file in files if file.kind in ("text", "csv")]
    binaries = [(file, why) for file in texts if (why := _binary(file))]
    if binaries:
        file, (what, advice) = binaries[0]
        more = (
            f" (and {len(binaries) - 1} more files that are not text)" if len(binaries) > 1 else ""
        )
        raise DataError(f"{file.path} is {what}, not text: {advice}{more}")


def _binary(file: SourceFile) -> tuple[str, str] | None:
    """Return (file type, remedy), or None for text."""
    with open_regular(file.path, follow_link=True) as opened:
        head = opened.read(_HEAD_BYTES)
    for at, begins, what, advice in _KNOWN:
        if head[at:].startswith(begins):
            return what, advice
    zeros, controls = head.count(0), len(head) - len(head.translate(None, _CONTROLS))
    if len(head) < _JUDGED_BYTES or not zeros:
        return None
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"
    if zeros > _MOST_ZEROS * len(head) or controls > _MOST_CONTROLS * len(head):
        return "binary (it has zero and control bytes)", "leave it out, or extract its text"
    return None
