"""Which way a pull takes: the same host's map, else the backend of both, else TCP, within one deadline."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from gyre_hpc.transport.backend import Room, WayFailed
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.regions import PullFailed, RegionServer

SECRET = b"s" * 32
ARRAYS = {"a": np.arange(1000.0)}


class Scripted:
    """A backend that reads the owner's file, or fails as told."""

    def __init__(self, fault: str = "", name: str = "scripted") -> None:
        self.name, self.fault, self.fetched = name, fault, 0
        self.offered: set[Path] = set()

    async def start(self) -> None:
        if self.fault == "start":
            raise WayFailed("no such network")

    def close(self) -> None: ...

    def offer(self, path: Path, total: int) -> str:
        if self.fault == "offer":
            raise WayFailed("no memory to register")
        self.offered.add(path)
        return str(path)

    def withdraw(self, path: Path) -> None:
        self.offered.discard(path)

    async def fetch(self, manifest: Manifest, room: Room, deadline: float) -> None:
        self.fetched += 1
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "fetch":
            raise ConnectionError("the fabric broke")
        data = bytearray(Path(manifest.ways[self.name]).read_bytes())
        data[0] ^= self.fault == "corrupt"
        memoryview(room.buffer)[:] = data


@pytest_asyncio.fixture
async def started() -> AsyncIterator[list[RegionServer]]:
    servers: list[RegionServer] = []
    yield servers
    for server in servers:
        server.close()


async def pair(
    started: list[RegionServer], backend: Scripted, *, same_host: bool = False
) -> tuple[RegionServer, RegionServer]:
    """Owner and puller with a backend each; only the puller's has the fault, unless it is the owner's to make."""
    key = uuid.uuid4().hex
    theirs = Scripted(backend.fault if backend.fault in ("start", "offer") else "")
    owner = RegionServer("127.0.0.1", "cell-0", key, secret=SECRET, backends=[theirs])
    puller = RegionServer("127.0.0.1", "cell-1", key, secret=SECRET, backends=[backend], same_host=same_host)
    for server in (owner, puller):
        await server.start()
        started.append(server)
    return owner, puller


def publish(owner: RegionServer, name: str = "policy") -> Manifest:
    return owner.publish(RegionKind.WEIGHTS, name, 3, "layout", ARRAYS)


async def test_on_one_host_no_byte_is_sent_unless_asked(started: list[RegionServer]) -> None:
    owner, puller = await pair(started, Scripted(), same_host=True)
    await puller.pull(publish(owner), deadline_s=30)
    assert puller.ways == {"same host": 1}
    owner, puller = await pair(started, Scripted())
    await puller.pull(publish(owner), deadline_s=30)
    assert puller.ways == {"scripted": 1}


async def test_a_process_maps_what_it_owns_itself(started: list[RegionServer]) -> None:
    owner, _ = await pair(started, Scripted("fetch"))
    await owner.pull(publish(owner), deadline_s=30)
    assert owner.ways == {"same host": 1}


async def test_a_backend_that_only_one_side_has_is_not_tried(started: list[RegionServer]) -> None:
    owner, puller = await pair(started, backend := Scripted())
    manifest = msgspec.structs.replace(publish(owner), ways={"other": "x"})
    await puller.pull(manifest, deadline_s=30)
    assert puller.ways == {"sockets": 1} and not backend.fetched


@pytest.mark.parametrize("fault", ["fetch", "corrupt"])
async def test_a_backend_that_fails_is_named_counted_and_left_alone_with_that_owner(
    started: list[RegionServer], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner, puller = await pair(started, backend := Scripted(fault))
    for _ in range(2):
        got = await puller.pull(publish(owner), deadline_s=30)
        np.testing.assert_array_equal(got["a"], ARRAYS["a"])
    assert puller.ways == {"scripted failed": 1, "sockets": 2} and backend.fetched == 1
    (record,) = [record for record in caplog.records if "by scripted" in record.message]
    assert "cell-0" in record.message
    assert ("the fabric broke" if fault == "fetch" else "checksum") in record.message


async def test_a_backend_that_hangs_leaves_time_for_tcp(started: list[RegionServer]) -> None:
    owner, puller = await pair(started, Scripted("hang"))
    got = await puller.pull(publish(owner), deadline_s=0.5)
    np.testing.assert_array_equal(got["a"], ARRAYS["a"])


async def test_all_ways_share_one_deadline(started: list[RegionServer]) -> None:
    owner, puller = await pair(started, Scripted("hang"))
    manifest = publish(owner)

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(mute, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        began = time.monotonic()
        with pytest.raises(PullFailed, match=r"within 0\.4 s"):
            mute_owner = msgspec.structs.replace(manifest, address=f"127.0.0.1:{port}")
            await puller.pull(mute_owner, deadline_s=0.4)
        assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize("fault", ["start", "offer"])
async def test_an_owner_whose_backend_cannot_offers_tcp(started: list[RegionServer], fault: str) -> None:
    owner, puller = await pair(started, Scripted(fault))
    manifest = publish(owner)
    assert manifest.ways == {} and owner.ways == {"scripted failed": 1}
    await puller.pull(manifest, deadline_s=30)
    assert puller.ways["sockets"] == 1


async def test_a_dropped_region_is_withdrawn(started: list[RegionServer]) -> None:
    owner, puller = await pair(started, Scripted())
    manifest = publish(owner)
    (offered,) = [backend.offered for backend in owner._backends if isinstance(backend, Scripted)]
    assert offered == {Path(manifest.path)}
    owner.drop(manifest)
    owner.drop(manifest)
    assert not offered
    with pytest.raises(PullFailed, match="dropped"):
        await puller.pull(manifest, deadline_s=30)
