"""Snapshots of what the journal says: a resume starts from the newest valid one and replays only what came later.

A snapshot is a file beside the journal, named by the place that it covers: `<epoch>-<offset>.snapshot`, all entries of the
run before byte `offset` of that epoch's file. It is (crc32 u32, msgpack body), written once the journal is on disk up to
that place, and appears whole or not at all. It replaces nothing: the journal stays whole, so a snapshot that is torn,
damaged, ahead of its journal or of other code costs a longer replay and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gyre_hpc.controller.journal.evaluations import EvaluationPoint
from gyre_hpc.controller.journal.journal import Journal
from gyre_hpc.records import ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.schedule.state import State
from gyre_hpc.transport.messages import ExecutionClosed, ExecutionOutcome, ExecutionSealed

log = logging.getLogger(__name__)
BURSTS = 8
"""Bursts between two snapshots: what a resume replays at most."""
KEPT = 2
"""Newest snapshots kept: one more than is needed, should the newest be damaged."""
CHECKSUM = struct.Struct("<I")


class Snapshot(msgspec.Struct, frozen=True):
    """The schedule's state and the controller's own tables after byte `offset` of the journal of `epoch`."""

    epoch: int
    offset: int
    state: State
    attempts: dict[ExecutionId, tuple[int, GroupId | None, str]]
    outcomes: dict[ExecutionId, ExecutionOutcome]
    closed: dict[ExecutionId, ExecutionClosed]
    sealed: dict[ExecutionId, ExecutionSealed]
    evaluations: list[EvaluationPoint]
    durations: dict[str, list[float]]
    checkpoint: tuple[Version, str] | None
    publications: int
    started_at: float | None
    resumes: int
    launched: set[ExecutionId]
    terminated: dict[ExecutionId, ClosingReason]
    guests: int = 0


def path_of(folder: Path, snapshot: Snapshot) -> Path:
    return folder / f"{snapshot.epoch:04d}-{snapshot.offset:012d}.snapshot"


def write(path: Path, snapshot: bytes) -> None:
    """Write the file, then remove all but the newest. A disk that is full costs the snapshot alone."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(CHECKSUM.pack(zlib.crc32(snapshot)) + snapshot)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        for older in sorted(path.parent.glob("*.snapshot"))[:-KEPT]:
            older.unlink()
    except OSError as error:
        log.warning("%s: %s; a resume replays from the snapshot before", path, error.strerror)
        draft.unlink(missing_ok=True)


def valid(folder: Path) -> Iterator[Snapshot]:
    """The snapshots of a journal that can be used, newest first; why others cannot is logged."""
    for path in sorted(folder.glob("*.snapshot"), reverse=True):
        snapshot = _read(path)
        if snapshot is not None:
            yield snapshot


def _read(path: Path) -> Snapshot | None:
    data = path.read_bytes()
    body = data[CHECKSUM.size :]
    if len(data) < CHECKSUM.size or zlib.crc32(body) != CHECKSUM.unpack_from(data)[0]:
        log.warning("%s fails its checksum; an earlier one or the whole journal is replayed", path)
        return None
    try:
        snapshot = msgspec.msgpack.decode(body, type=Snapshot)
    except msgspec.MsgspecError as error:
        log.warning("%s is of other code (%s); an earlier one or the whole journal is replayed", path, error)
        return None
    journal = path.with_name(f"{snapshot.epoch:04d}.journal")
    if not journal.is_file() or journal.stat().st_size < snapshot.offset:
        log.warning("%s is ahead of %s; an earlier one or the whole journal is replayed", path, journal)
        return None
    return snapshot


@dataclass
class Snapshots:
    """Takes one at every `every`-th end of a burst. `capture` gives what the journal says up to its present end."""

    journal: Journal
    capture: Callable[[], Snapshot]
    every: int = BURSTS
    _bursts: int = 0
    _writing: set[asyncio.Task[None]] = field(default_factory=set)

    def burst_ended(self) -> None:
        """To be called between two entries of the journal, with a loop running."""
        self._bursts += 1
        if self._bursts < self.every:
            return
        self._bursts = 0
        snapshot = self.capture()
        task = asyncio.create_task(self._write(snapshot, msgspec.msgpack.encode(snapshot)))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, snapshot: Snapshot, body: bytes) -> None:
        """Not before the journal is on disk as far as the snapshot goes."""
        await self.journal.sync()
        await asyncio.to_thread(write, path_of(self.journal.path.parent, snapshot), body)

    async def written(self) -> None:
        """Wait for those under way. What a full disk stopped is not needed."""
        await asyncio.gather(*self._writing, return_exceptions=True)
