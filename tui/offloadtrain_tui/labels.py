"""The user's labels of a run: tags, a note, a pin, in `labels.json` next to its log.

The trainer never reads it, and a run that trains may be labelled too.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.boundary.safe_write import replace_file
from offloadtrain_tui.reading import runs
from offloadtrain_tui.text import clean

LONGEST_TAG, LONGEST_NOTE, MOST_TAGS = 40, 400, 32
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Labels:
    """Attributes:
    pinned: listed before runs that are not.
    """

    tags: tuple[str, ...] = ()
    note: str = ""
    pinned: bool = False

    @property
    def text(self) -> str:
        """All of them on a line; "" if there are none."""
        tags = " ".join(f"#{tag}" for tag in self.tags)
        return "  ".join(filter(None, ("pinned" if self.pinned else "", tags, self.note)))


NONE = Labels()


def read(folder: Path) -> Labels:
    """Return the labels of a run. The folder is untrusted: invalid labels are ignored."""
    values = None
    with suppress(OSError):
        values = read_json(folder / "labels.json", max_bytes=_MOST_BYTES)
    if not isinstance(values, dict):
        return NONE
    tags, note = values.get("tags"), values.get("note")
    known = tags[:MOST_TAGS] if isinstance(tags, list) else []
    return Labels(
        tuple(clean(tag, LONGEST_TAG) for tag in known if isinstance(tag, str)),
        clean(note, LONGEST_NOTE) if isinstance(note, str) else "",
        values.get("pinned") is True,
    )


def write(folder: Path, labels: Labels) -> None:
    """Write the labels whole.

    Raises:
        OSError: the folder cannot be written.
    """
    replace_file(folder / "labels.json", json.dumps(asdict(labels)))


def tag(
    run: Path,
    /,
    *tags: str,
    remove: Annotated[bool, Parameter(negative="")] = False,
    note: str | None = None,
    pin: bool | None = None,
) -> int:
    """Label a run with tags, a note, a pin, and print its labels.

    Parameters
    ----------
    run
        A run folder, or a folder of runs (selects the newest).
    tags
        Words to add.
    remove
        Remove these tags instead.
    note
        A sentence on the run; "" removes it.
    pin
        List the run before others.
    """
    try:
        (run_path,) = runs.find([run])
        if run_path.folder is None:
            raise runs.RunError(f"{run} is an event file: give its run folder")
        labels = _labelled(read(run_path.folder), tags, note, pin, remove=remove)
        if labels != read(run_path.folder):
            write(run_path.folder, labels)
    except (runs.RunError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{clean(run_path.name)}  {labels.text or 'no labels'}")
    return 0


def _labelled(
    before: Labels, tags: tuple[str, ...], note: str | None, pin: bool | None, *, remove: bool
) -> Labels:
    """Raises RunError for tags that would not be saved unchanged."""
    for tag in tags:
        if not tag.strip() or tag != clean(tag, LONGEST_TAG):
            raise runs.RunError(f"tag {tag!r}: give at most {LONGEST_TAG} printable characters")
    remaining = tuple(tag for tag in before.tags if tag not in tags)
    new_tags = remaining if remove else tuple(dict.fromkeys((*before.tags, *tags)))
    if len(new_tags) > MOST_TAGS:
        raise runs.RunError(f"{len(new_tags)} tags: a run has at most {MOST_TAGS}")
    if note is not None and note != clean(note, LONGEST_NOTE):
        raise runs.RunError(f"--note: give at most {LONGEST_NOTE} printable characters")
    return replace(
        before,
        tags=new_tags,
        note=before.note if note is None else note,
        pinned=before.pinned if pin is None else pin,
    )
