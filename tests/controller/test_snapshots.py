"""Snapshots: a resume from one stands where a replay of the whole journal stands, and no damage to one loses anything."""

from __future__ import annotations

import asyncio
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.journal import history as module
from gyre_hpc.controller.journal import snapshots
from gyre_hpc.controller.journal.entries import Happened
from gyre_hpc.controller.journal.history import History, read_history
from gyre_hpc.controller.journal.journal import Journal, read_journal
from gyre_hpc.controller.journal.snapshots import CHECKSUM, Snapshot, Snapshots
from gyre_hpc.controller.train import schedule_settings
from gyre_hpc.errors import CorruptRecord
from gyre_hpc.schedule.protocol import EndBurst
from gyre_hpc.transport import messages as msg
from tests.controller.world import FakePeers, Interrupt, make_controller, small_run

STEPS = 6
CONFIG = small_run(STEPS, heldout=3)
SETTINGS = schedule_settings(CONFIG)


async def record(run: Path, deaths: tuple[int, ...]) -> set[int]:
    """A run with a snapshot at each burst; each death comes after so many messages. Returns executions in shards."""
    at_rest: set[int] = set()
    for epoch, death in enumerate((*deaths, 0), start=1):
        left = death

        def watch(controller: Controller, message: msg.Message) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Interrupt

        controller = make_controller(run, CONFIG, epoch, watch)
        controller.snapshots.every = 1
        if death:
            with pytest.raises(Interrupt):
                await controller.run()
        else:
            await controller.run()
        at_rest |= cast(FakePeers, controller.peers).services.at_rest
    return at_rest


def only(journal: Path, folder: Path, *kept: Path) -> Path:
    """A copy of the journal with no snapshots but these."""
    shutil.copytree(journal, folder, ignore=shutil.ignore_patterns("*.snapshot"))
    for path in kept:
        shutil.copy(path, folder)
    return folder


def live(history: History) -> History:
    """Without finished executions of groups that are gone."""
    history.forget_all_but(history.state.groups, ())
    return history


@pytest.mark.parametrize("deaths", [(), (60,), (300,), (200, 1, 150), (330, 260)])
async def test_a_resume_from_any_snapshot_stands_where_the_whole_replay_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: tuple[int, ...]
) -> None:
    monkeypatch.setattr(snapshots, "KEPT", 1000)
    at_rest = await record(tmp_path, deaths)
    journal = tmp_path / "journal"
    taken = sorted(journal.glob("*.snapshot"))
    ends = [entry for entry in read_journal(journal) if isinstance(entry, Happened)]
    assert len(taken) == sum(isinstance(it, EndBurst) for entry in ends for it in entry.decisions) >= STEPS
    whole = read_history(only(journal, tmp_path / "whole"), SETTINGS)
    every, expected = dict(whole.outcomes), live(whole)
    for path in taken:
        resumed = read_history(only(journal, tmp_path / path.stem, path), SETTINGS)
        assert resumed.outcomes.items() <= every.items()
        assert every.keys() - resumed.outcomes.keys() <= at_rest, "an outcome that no shard has is lost"
        assert live(resumed) == expected


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_other_code(path: Path) -> None:
    body = msgspec.msgpack.encode({"epoch": 1, "offset": 7, "state": {"cells": "three"}})
    path.write_bytes(CHECKSUM.pack(zlib.crc32(body)) + body)


def of_another_schedule(path: Path) -> None:
    """Well formed, and yet not what the events that follow it were decided from."""
    snapshot = msgspec.msgpack.decode(path.read_bytes()[CHECKSUM.size :], type=Snapshot)
    state = msgspec.structs.replace(snapshot.state, next_execution=10**6, next_group=10**6)
    snapshots.write(path, msgspec.msgpack.encode(msgspec.structs.replace(snapshot, state=state)))


def ahead_of_its_journal(path: Path) -> None:
    """The host died before the journal was on disk, which `Snapshots` waits for: a disk that lied."""
    snapshot = msgspec.msgpack.decode(path.read_bytes()[CHECKSUM.size :], type=Snapshot)
    snapshots.write(path, msgspec.msgpack.encode(msgspec.structs.replace(snapshot, offset=10**9)))


DAMAGES: list[Callable[[Path], None]] = [
    flip,
    tear,
    empty,
    of_other_code,
    of_another_schedule,
    ahead_of_its_journal,
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_snapshot_costs_a_longer_replay_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    await record(tmp_path, (330,))
    journal, starts = tmp_path / "journal", cast(list[tuple[int, int]], [])

    def spy(folder: Path, epoch: int = 0, offset: int = 0) -> Any:
        starts.append((epoch, offset))
        return read_journal(folder, epoch, offset)

    monkeypatch.setattr(module, "read_journal", spy)
    before, newest = sorted(journal.glob("*.snapshot"))[-2:]
    place = tuple(map(int, before.stem.split("-")))
    whole = live(read_history(only(journal, tmp_path / "whole"), SETTINGS))
    assert starts == [(0, 0)]
    damage(newest)
    assert live(read_history(journal, SETTINGS)) == whole
    assert starts[-1] == place
    damage(before)
    assert live(read_history(journal, SETTINGS)) == whole
    assert starts[-1] == (0, 0)


async def test_a_resume_from_a_snapshot_reads_nothing_that_lies_before_it(tmp_path: Path) -> None:
    await record(tmp_path, ())
    journal = tmp_path / "journal"
    expected = live(read_history(journal, SETTINGS))
    path = journal / "0001.journal"
    data = bytearray(path.read_bytes())
    data[20] ^= 0xFF
    path.write_bytes(data)
    assert live(read_history(journal, SETTINGS)) == expected
    with pytest.raises(CorruptRecord, match="byte 0"):
        read_history(only(journal, tmp_path / "whole"), SETTINGS)


async def test_a_run_under_other_settings_is_replayed_whole(tmp_path: Path) -> None:
    await record(tmp_path, ())
    with pytest.raises(CorruptRecord, match="replaying"):
        read_history(tmp_path / "journal", msgspec.structs.replace(SETTINGS, batch_groups=3))


async def test_the_journal_is_on_disk_before_a_snapshot_of_it(tmp_path: Path) -> None:
    journal, history = Journal(tmp_path, 1), History(read_history(tmp_path, SETTINGS).state)
    synced, go_on = asyncio.Event(), asyncio.Event()

    async def sync() -> None:
        synced.set()
        await go_on.wait()

    journal.sync = sync  # type: ignore[method-assign]
    keeper = Snapshots(journal, lambda: history.snapshot(1, journal.end, history.state), every=2)
    keeper.burst_ended()
    assert not keeper._writing
    keeper.burst_ended()
    await synced.wait()
    assert not list(tmp_path.glob("*snapshot*"))
    go_on.set()
    await keeper.written()
    assert [path.name for path in tmp_path.glob("*snapshot*")] == ["0001-000000000000.snapshot"]
    journal.close()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for offset in (5, 70, 600):
        snapshots.write(tmp_path / f"0001-{offset:012d}.snapshot", b"")
    snapshots.write(tmp_path / f"0002-{0:012d}.snapshot", b"")
    assert [path.stem for path in sorted(tmp_path.iterdir())] == ["0001-000000000600", "0002-000000000000"]


def test_a_full_disk_costs_the_snapshot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    snapshots.write(tmp_path / "0001-000000000001.snapshot", b"before")
    monkeypatch.setattr("gyre_hpc.controller.journal.snapshots.os.fsync", full)
    snapshots.write(tmp_path / "0001-000000000002.snapshot", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["0001-000000000001.snapshot"]
