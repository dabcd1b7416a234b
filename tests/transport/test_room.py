"""Rooms: what is handed out is checked and stays whole while anybody refers to it; only then is its memory used again."""

from __future__ import annotations

import os

import numpy as np
import pytest
import xxhash

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.transport.messages import Fragment
from gyre_hpc.transport.room import Room, Spares


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


def test_a_file_is_asked_for_before_the_memory() -> None:
    room = Room(fragments(b"x"))
    assert room.buffer
    with pytest.raises(ValueError, match="anonymous"):
        room.file()
