"""Rooms: what is handed out is checked and stays whole while anybody refers to it; only then is its memory used again."""

from __future__ import annotations

import os

import numpy as np
import pytest
import xxhash

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.transport.messages import Fragment
from gyre_hpc.transport.mpi.backend import checking
from gyre_hpc.transport.region_files import _offsets
from gyre_hpc.transport.room import Room, Spares
from tests.transport.mpi_run import until


def fragments(*contents: bytes) -> tuple[Fragment, ...]:
    return tuple(
        Fragment(str(i), (len(data),), "|u1", len(data), xxhash.xxh3_64_hexdigest(data))
        for i, data in enumerate(contents)
    )


def filled(data: bytes, spares: Spares, *, shared: bool = False) -> Room:
    room = Room(fragments(data), spares)
    if shared:
        os.pwrite(room.file(), data, 0)
    else:
        memoryview(room.buffer)[: len(data)] = data
    return room


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_used_again_once_nobody_refers_to_its_arrays(shared: bool) -> None:
    spares = Spares()
    first = filled(b"first", spares, shared=shared).arrays()
    view = first["0"][1:3]
    address = first["0"].ctypes.data
    del first
    other = filled(b"other", spares, shared=shared).arrays()
    assert other["0"].ctypes.data != address and view.tobytes() == b"ir"
    del view
    third = filled(b"third", spares, shared=shared).arrays()
    assert third["0"].ctypes.data == address and third["0"].tobytes() == b"third"
    assert other["0"].tobytes() == b"other"


def test_memory_of_another_kind_or_size_is_not_taken() -> None:
    spares = Spares()
    address = filled(b"first", spares).arrays()["0"].ctypes.data
    assert filled(b"first", spares, shared=True).arrays()["0"].ctypes.data != address
    assert filled(b"x" * 65, spares).arrays()["0"].ctypes.data != address


def test_memory_that_a_broken_way_may_still_write_to_is_not_seen_again() -> None:
    spares = Spares()
    room = filled(b"wrong", spares)
    room._fragments = fragments(b"right")
    address = np.frombuffer(room.buffer, np.uint8).ctypes.data
    with pytest.raises(CorruptRecord, match="'0'"):
        room.arrays()
    kept = room.buffer
    del room
    assert filled(b"right", spares).arrays()["0"].ctypes.data != address and kept


def test_spare_memory_has_a_limit() -> None:
    spares = Spares(keep_bytes=128)
    held = [filled(bytes([i]) * 64, spares).arrays() for i in range(4)]
    del held
    assert sum(memory.size for memory in spares._free) == 128


async def test_a_room_is_checked_while_its_bytes_come_and_no_thread_of_it_is_left() -> None:
    whole = bytes(range(256)) * 300
    room = Room(fragments(whole, b"right"))
    memoryview(room.buffer)[: len(whole)] = whole
    async with checking(room) as moved:
        moved(1000)
        await until("the first check", lambda: room._check is not None and room._check._hashed == 1000)
        moved(60_000)
        await until("the second check", lambda: room._check is not None and room._check._hashed == 60_000)
    with pytest.raises(CorruptRecord, match="'1'"):
        room.arrays()


async def test_what_is_wrong_at_the_front_is_known_at_the_end_of_the_block() -> None:
    room = Room(fragments(b"right" * 20, b"right"))
    with pytest.raises(CorruptRecord, match="'0'"):
        async with checking(room) as moved:
            moved(room.bytes)
            await until("the check", lambda: room._check is not None)
    with pytest.raises(ConnectionError):
        async with checking(Room(fragments(b"x"))):
            raise ConnectionError


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
@pytest.mark.parametrize("before", [0, 1_000_000, 3_000_000])
def test_the_rest_of_a_large_region_is_checked_by_several_threads(wrong: int | None, before: int) -> None:
    parts = [bytes([i]) * 2_000_000 for i in range(3)]
    room = Room(fragments(*parts))
    view = memoryview(room.buffer)
    for i, start in enumerate(_offsets(room._fragments)):
        view[start : start + len(parts[i])] = parts[i]
        if wrong == i:
            view[start + 1_900_000] ^= 1
    if wrong == 0 and before > 2_000_000:
        with pytest.raises(CorruptRecord, match="'0'"):
            room.arrived(before)
        return
    if before:
        room.arrived(before)
    if wrong is None:
        assert [array.tobytes() for array in room.arrays().values()] == parts
    else:
        with pytest.raises(CorruptRecord, match=f"'{wrong}'"):
            room.arrays()


def test_a_file_is_asked_for_before_the_memory() -> None:
    room = Room(fragments(b"x"))
    assert room.buffer
    with pytest.raises(ValueError, match="anonymous"):
        room.file()
