"""`manifest.jsonl` of a sweep folder: one line per point, in order of the first call.

The file is replaced whole at every record, so a reader sees each point as it was before or after, never between. A point
is recorded before it is looked at, when its run folder is made, and when its job has an id; if the caller died in
between, the id is found in RUN/jobs, as are those of jobs submitted later by hand. Run folders are named relative to
the sweep folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, Self

import msgspec

from gyre_hpc.errors import CorruptRecord, MissingInput
from gyre_hpc.files import replace_file
from gyre_hpc.layout import RunLayout
from gyre_hpc.sweep.points import Point

FILE_NAME: Final = "manifest.jsonl"


class Entry(msgspec.Struct, frozen=True):
    """What is known of a point at `time` (UTC): run folder and job once they exist, else the error that prevented it."""

    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    run: str | None
    job: str | None
    error: str | None
    time: datetime

    @property
    def point(self) -> Point:
        return Point(self.overrides, self.swept)


@dataclass
class Manifest:
    """The points of one sweep folder."""

    folder: Path
    _entries: dict[frozenset[str], Entry] = field(default_factory=dict)

    @classmethod
    def opened(cls, folder: Path) -> Self:
        """The manifest of a sweep folder, empty where there is none. Raises CorruptRecord naming the line."""
        manifest = cls(folder.absolute())
        path = manifest.folder / FILE_NAME
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise CorruptRecord(
                    f"{path}, line {number}: not a point of a sweep ({error})", fix="mend or remove that line"
                ) from error
            manifest._entries[entry.point.identity] = entry
        return manifest

    @classmethod
    def existing(cls, folder: Path) -> Self:
        """The same, of a folder that must be one of a sweep. Raises MissingInput."""
        if not (folder / FILE_NAME).is_file():
            raise MissingInput(
                f"{folder}: no {FILE_NAME}",
                fix="name the sweep folder that gyre train --multirun hydra/launcher=gyre_slurm told",
            )
        return cls.opened(folder)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def find(self, point: Point) -> Entry | None:
        return self._entries.get(point.identity)

    def record(
        self,
        point: Point,
        *,
        run: RunLayout | None = None,
        job: str | None = None,
        error: str | None = None,
        time: datetime,
    ) -> Entry:
        """Write down what is known of a point from here on; it keeps its place."""
        entry = Entry(point.overrides, point.swept, self._named(run), job, error, time)
        self._entries[point.identity] = entry
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [msgspec.json.encode(each) + b"\n" for each in self.entries]
        replace_file(self.folder / FILE_NAME, b"".join(lines))
        return entry

    def _named(self, run: RunLayout | None) -> str | None:
        return os.path.relpath(run.root, self.folder) if run else None

    def run_of(self, entry: Entry) -> RunLayout | None:
        """The point's run folder, if it was made and is still there."""
        if entry.run is None:
            return None
        layout = RunLayout(Path(os.path.normpath(self.folder / entry.run)))
        return layout if layout.config.is_file() else None

    def job_of(self, entry: Entry) -> str | None:
        """The newest job of the point, also one the manifest does not know."""
        layout = self.run_of(entry)
        scripts = layout.jobs.glob("*_submission.sh") if layout else ()
        found = [
            int(number) for number in (path.name.partition("_")[0] for path in scripts) if number.isdigit()
        ]
        known = [int(entry.job)] if entry.job else []
        return str(max(found + known)) if found or known else None
