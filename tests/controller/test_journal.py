"""The journal: what was appended is read back; a torn tail ends it, corruption is named."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from gyre_hpc.controller.journal.entries import Happened
from gyre_hpc.controller.journal.history import read_history
from gyre_hpc.controller.journal.journal import Journal, read_journal
from gyre_hpc.errors import CorruptRecord, StorageFull
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.schedule.settings import Settings

SETTINGS = Settings(capacities=(11, 11, 11))
EVENTS: list[p.AnyEvent] = [
    p.Started(),
    *(p.CellReady(CellId(cell), p.Role.ROLLOUT) for cell in range(3)),
]


def write_run(folder: Path) -> Journal:
    journal, state = Journal(folder, 1), initial_state(SETTINGS)
    for at, event in enumerate(EVENTS):
        state, decisions = decide(state, event)
        journal.append(Happened(float(at), event, tuple(decisions)))
    journal.close()
    return journal


def test_replay_gives_the_state_the_run_had(tmp_path: Path) -> None:
    write_run(tmp_path)
    state = initial_state(SETTINGS)
    for event in EVENTS:
        state, _ = decide(state, event)
    assert read_history(tmp_path, SETTINGS).state == state
    assert state.dispatched == 32


def test_a_torn_tail_is_ignored(tmp_path: Path) -> None:
    journal = write_run(tmp_path)
    with journal.path.open("ab") as file:
        file.write(b"\x40\x00\x00\x00\x01\x02\x03\x04half a frame")
    assert len(list(read_journal(tmp_path))) == len(EVENTS)


def test_a_tail_that_never_reached_the_disk_reads_as_torn(tmp_path: Path) -> None:
    journal = write_run(tmp_path)
    with journal.path.open("ab") as file:
        file.write(bytes(4096))
    assert len(list(read_journal(tmp_path))) == len(EVENTS)


def test_a_flipped_byte_names_file_and_offset(tmp_path: Path) -> None:
    journal = write_run(tmp_path)
    data = bytearray(journal.path.read_bytes())
    data[20] ^= 0xFF
    journal.path.write_bytes(data)
    with pytest.raises(CorruptRecord, match=r"0001\.journal: frame at byte 0"):
        list(read_journal(tmp_path))


def test_a_replay_that_decides_otherwise_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.append(Happened(0.0, p.Started(), (p.Publish(Version(9)),)))
    journal.close()
    with pytest.raises(CorruptRecord, match="replaying Started"):
        read_history(tmp_path, SETTINGS)


def test_a_full_disk_keeps_whole_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, 1)
    journal.append(Happened(0.0, p.Started(), ()))
    whole = journal.path.read_bytes()

    def full(descriptor: int, data: bytes) -> int:
        monkeypatch.undo()
        os.write(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gyre_hpc.controller.journal.journal.os.write", full)
    with pytest.raises(StorageFull, match="No space left"):
        journal.append(Happened(1.0, p.Started(), ()))
    assert journal.path.read_bytes() == whole


async def test_a_slow_fsync_holds_up_neither_the_loop_nor_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, go_on, fsync, synced = Journal(tmp_path, 1), threading.Event(), os.fsync, []

    def slow(descriptor: int) -> None:
        go_on.wait(60)
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr("gyre_hpc.controller.journal.journal.os.fsync", slow)
    journal.append(Happened(0.0, p.Started(), ()))
    journal.sync_soon()
    waiting = asyncio.create_task(journal.sync())
    for _ in range(10):
        await asyncio.sleep(0)
    journal.append(Happened(1.0, p.Started(), ()))
    assert not waiting.done() and len(list(read_journal(tmp_path))) == 2
    go_on.set()
    await waiting
    assert synced == [journal.path.stat().st_ino] * 2, "an entry of before the call was not on disk after it"
    journal.close()


async def test_a_failed_fsync_ends_the_run_whoever_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gyre_hpc.controller.journal.journal.os.fsync", full)
    journal.append(Happened(0.0, p.Started(), ()))
    with pytest.raises(StorageFull, match="No space left"):
        await journal.sync()
    monkeypatch.undo()
    with pytest.raises(StorageFull, match="No space left"):
        journal.sync_soon()
    journal.close()
