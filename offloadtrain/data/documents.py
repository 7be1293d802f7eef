"""Read the documents of a piece of a source: the work of a worker.

Everything here runs in worker threads or processes, and is pure: the result depends on the file and
the piece only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.data.chat import Mask
from offloadtrain.data.cut import Piece
from offloadtrain.data.encode import Document, Encoder
from offloadtrain.data.records import Bad, records
from offloadtrain.data.tokenizer import ByteTokenizer, Ids
from offloadtrain.data.tokens import DataError

_BATCH = 1000  # records that are encoded at once


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading options.

    Attributes:
        threshold: documents whose 64-bit hash is below it are held out for validation.
        keep_going: count bad records instead of stopping at the first.
    """

    encoder: Encoder
    threshold: int
    keep_going: bool


@dataclass(slots=True)
class Side:
    """The tokens of the documents on one side, training or validation.

    Attributes:
        ends: the index after the last token of each document that ends.
    """

    parts: list[Ids] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, tokens: Ids, counted: Mask | None, ends_document: bool) -> None:
        self.parts.append(tokens)
        if counted is not None:
            self.masks.append(counted)
        self.size += len(tokens)
        if ends_document:
            self.ends.append(self.size)

    def join(self) -> None:
        """Make one array of each kind, which is faster to send to another process."""
        self.parts = [np.concatenate(self.parts)] if self.parts else []
        self.masks = [np.concatenate(self.masks)] if self.masks else []


@dataclass(slots=True)
class Encoded:
    """The documents of one or more pieces.

    Attributes:
        lowest, highest: hash of any document; lowest > highest if there was none.
        lines: records read, including bad and blank ones.
        bad: (number of the record in the piece from 0, what is wrong with it).
    """

    train: Side = field(default_factory=Side)
    val: Side = field(default_factory=Side)
    lowest: int = 1 << 64
    highest: int = -1
    lines: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)

    def add(self, document: Document, threshold: int, ends_document: bool = True) -> None:
        split_hash = document.split_hash
        side = self.val if split_hash < threshold else self.train
        side.add(document.tokens, document.counted, ends_document)
        self.lowest = min(self.lowest, split_hash)
        self.highest = max(self.highest, split_hash)


def read_pieces(pieces: tuple[Piece, ...], reading: Reading) -> Encoded:
    """Read and encode pieces in order.

    Raises:
        OSError: a file cannot be read.
        DataError: a file became shorter after it was found, or is of another form.
    """
    encoded = Encoded()
    for piece in pieces:
        if piece.split_hash is None:
            _read_table(piece, reading, encoded)
        else:
            document = Document(piece.split_hash, _read_text(piece, reading.encoder), None)
            encoded.add(document, reading.threshold, piece.ends_document)
    encoded.train.join()
    encoded.val.join()
    return encoded


def _read_text(piece: Piece, encoder: Encoder) -> Ids:
    with open_regular(piece.file.path, follow_link=True) as file:
        file.seek(piece.start)
        raw = file.read(piece.stop - piece.start)
    if len(raw) < piece.stop - piece.start:
        raise DataError(f"{piece.file.path} became shorter while it was read")
    if isinstance(encoder.tokenizer, ByteTokenizer):
        ids = np.frombuffer(raw, np.uint8)
    else:
        try:
            (ids,) = encoder.tokenizer.encode_batch([raw.decode("utf-8")])
        except UnicodeDecodeError as error:
            raise DataError(
                f"{piece.file.path} is not UTF-8 at byte {piece.start + error.start}: convert it "
                '(iconv -f LATIN1 -t UTF-8), or set tokenizer = "bytes"'
            ) from error
    return encoder.ended(ids, begins=piece.begins_document, ends=piece.ends_document)


def _read_table(piece: Piece, reading: Reading, output: Encoded) -> None:
    stream = records(piece, reading.encoder.columns)
    while batch := list(itertools.islice(stream, _BATCH)):
        encoded = iter(
            reading.encoder.encode([record for record in batch if isinstance(record, dict)])
        )
        for record in batch:
            number, output.lines = output.lines, output.lines + 1
            document = next(encoded) if isinstance(record, dict) else record
            if isinstance(document, Bad):
                output.bad.append((number, document.problem))
                if not reading.keep_going:
                    return
            elif document is not None:
                output.add(document, reading.threshold)
