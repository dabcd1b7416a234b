"""Regions: what is pulled equals what was published, whole, or nothing is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.transport import region_files
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.regions import PullFailed, RegionServer, pull, remove_leftovers

Array = npt.NDArray[Any]
SECRET = b"s" * 32
PATIENCE_S = 30.0
ARRAYS: dict[str, Array] = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "ids": np.array([3, 1, 2], dtype=np.int32),
    "scalar": np.array(7.0),
    "none": np.empty((0, 5), dtype=np.float32),
}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RegionServer]:
    server = RegionServer("127.0.0.1", "cell-0", uuid.uuid4().hex, secret=SECRET)
    await server.start()
    yield server
    server.close()


def publish(server: RegionServer, arrays: dict[str, Array] = ARRAYS) -> Manifest:
    return server.publish(RegionKind.WEIGHTS, "policy", 3, "layout", arrays)


def from_elsewhere(manifest: Manifest) -> Manifest:
    """The manifest as seen from a host that does not have the owner's file."""
    return msgspec.structs.replace(manifest, path="/nowhere/" + Path(manifest.path).name)


def assert_equal(got: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array, strict=True)


async def test_a_pull_on_the_owners_host_maps_the_same_arrays(server: RegionServer) -> None:
    assert_equal(await pull(publish(server), deadline_s=PATIENCE_S), ARRAYS)


async def test_a_pull_from_another_host_streams_the_same_arrays(server: RegionServer) -> None:
    remote = from_elsewhere(publish(server))
    assert_equal(await pull(remote, deadline_s=PATIENCE_S, secret=SECRET), ARRAYS)


async def test_a_manifest_survives_the_wire(server: RegionServer) -> None:
    manifest = publish(server)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5),
        hnp.arrays(
            st.sampled_from(["<f4", ">f4", "<i8", "|u1"]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
        ),
    )
)
def test_any_plain_arrays_come_back_from_a_region_file(arrays: dict[str, Array]) -> None:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"region-{uuid.uuid4().hex}"
    fragments = region_files.write(path, arrays)
    buffer = region_files.map_file(path, region_files.total_bytes(fragments))
    path.unlink()
    for name, array in region_files.verified(buffer, fragments).items():
        np.testing.assert_array_equal(array, arrays[name], strict=False)
        assert array.shape == arrays[name].shape


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 200), max_size=5),
    st.lists(st.integers(0, 1200), max_size=8),
    st.none() | st.integers(0, 1 << 30),
)
def test_bytes_are_checked_alike_however_they_arrive(
    sizes: list[int], cuts: list[int], flip: int | None
) -> None:
    """A flipped byte is found, by the fragment it lies in, whatever pieces the bytes came in; padding counts for nothing."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"region-{uuid.uuid4().hex}"
    fragments = region_files.write(path, {str(i): np.full(n, i, np.uint8) for i, n in enumerate(sizes)})
    data = bytearray(path.read_bytes())
    path.unlink()
    total = region_files.total_bytes(fragments)
    places = [
        (i, offset + k)
        for i, offset in enumerate(region_files._offsets(fragments))
        for k in range(fragments[i].bytes)
    ]
    broken = places[flip % len(places)] if places and flip is not None else None
    if broken is not None:
        data[broken[1]] ^= 1
    check = region_files.Check(data, fragments)
    try:
        for count in sorted(min(cut, total) for cut in [*cuts, total]):
            check.arrived(count)
        assert broken is None
    except CorruptRecord as error:
        assert broken is not None and f"'{broken[0]}'" in str(error)


@pytest.mark.parametrize("broken", [None, 0, 7, 15])
def test_a_large_region_is_checked_by_several_threads_alike(broken: int | None, tmp_path: Path) -> None:
    size = region_files.HASH_TOGETHER // 16
    fragments = region_files.write(
        tmp_path / "region", {str(i): np.full(size, i, np.uint8) for i in range(16)}
    )
    data = bytearray((tmp_path / "region").read_bytes())
    if broken is None:
        assert list(region_files.verified(data, fragments)) == [fragment.id for fragment in fragments]
        return
    data[broken * size + size - 1] ^= 1
    with pytest.raises(CorruptRecord, match=f"'{broken}'"):
        region_files.verified(data, fragments)


async def test_pulled_arrays_are_private_and_outlive_the_region(server: RegionServer) -> None:
    manifest = publish(server)
    first = await pull(manifest, deadline_s=PATIENCE_S)
    first["ids"][0] = 99
    second = await pull(manifest, deadline_s=PATIENCE_S)
    server.drop(manifest)
    server.drop(manifest)
    assert second["ids"][0] == 3
    with pytest.raises(PullFailed, match="dropped"):
        await pull(manifest, deadline_s=PATIENCE_S, secret=SECRET)


async def test_a_wrong_secret_gets_no_byte(server: RegionServer) -> None:
    remote = from_elsewhere(publish(server))
    for secret in (b"", b"t" * 32):
        with pytest.raises(PullFailed, match="secret"):
            await pull(remote, deadline_s=PATIENCE_S, secret=secret)


async def test_a_server_without_a_secret_serves_nobody_over_tcp() -> None:
    server = RegionServer("127.0.0.1", "cell-0", uuid.uuid4().hex)
    await server.start()
    remote = from_elsewhere(publish(server))
    with pytest.raises(PullFailed, match="secret"):
        await pull(remote, deadline_s=PATIENCE_S)
    server.close()


@pytest.mark.parametrize("remote", [False, True])
async def test_a_flipped_bit_fails_the_pull_and_leaves_the_target_alone(
    server: RegionServer, remote: bool
) -> None:
    manifest = publish(server)
    path = Path(manifest.path)
    data = bytearray(path.read_bytes())
    data[64] ^= 1
    path.write_bytes(data)
    target = {name: np.full_like(array, 5) for name, array in ARRAYS.items()}
    with pytest.raises(PullFailed, match="'ids': checksum"):
        manifest = from_elsewhere(manifest) if remote else manifest
        await pull(manifest, into=target, deadline_s=PATIENCE_S, secret=SECRET)
    assert all((array == 5).all() for array in target.values())


async def test_a_pull_into_given_arrays_fills_them(server: RegionServer) -> None:
    target = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
    got = await pull(publish(server), into=target, deadline_s=PATIENCE_S)
    assert_equal(target, ARRAYS)
    assert all(got[name] is target[name] for name in target)


async def test_a_target_of_another_shape_is_refused_before_anything_is_copied(server: RegionServer) -> None:
    target = {name: np.zeros_like(array) for name, array in ARRAYS.items()} | {"ids": np.zeros(2, np.int32)}
    with pytest.raises(PullFailed, match="'ids'"):
        await pull(publish(server), into=target, deadline_s=PATIENCE_S)
    assert not target["weight"].any()


async def test_a_truncated_file_fails_the_pull(server: RegionServer) -> None:
    manifest = publish(server)
    os.truncate(manifest.path, 10)
    with pytest.raises(PullFailed, match="10 bytes"):
        await pull(manifest, deadline_s=PATIENCE_S)


async def test_an_owner_that_does_not_answer_meets_the_deadline(server: RegionServer) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    manifest = msgspec.structs.replace(from_elsewhere(publish(server)), address=f"127.0.0.1:{port}")
    with pytest.raises(PullFailed, match="within"):
        await pull(manifest, deadline_s=0.05)
    listener.close()


OWNER = """
import asyncio, sys, msgspec, numpy as np
from gyre_hpc.transport.regions import RegionServer, RegionKind
async def main():
    server = RegionServer("127.0.0.1", "cell-9", sys.argv[1], secret=b"s" * 32)
    await server.start()
    manifest = server.publish(RegionKind.WEIGHTS, "big", 0, "", {"a": np.ones(1 << 24, np.uint8)})
    sys.stdout.buffer.write(msgspec.json.encode(manifest) + b"\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_an_owner_killed_in_the_middle_of_a_pull_fails_it() -> None:
    run_key = uuid.uuid4().hex
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, run_key, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    manifest = msgspec.json.decode(await owner.stdout.readline(), type=Manifest)
    host, port = manifest.address.split(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes the first MiB on, kills the owner, passes on what is left."""
        upstream, request = await asyncio.open_connection(host, int(port))
        writer.write(await upstream.readexactly(32))
        request.write(await reader.read(4096))
        writer.write(await upstream.readexactly(1 << 20))
        os.kill(owner.pid, signal.SIGKILL)
        while data := await upstream.read(1 << 20):
            writer.write(data)
            await writer.drain()
        writer.close()
        request.close()

    listener = await asyncio.start_server(relay, "127.0.0.1", 0)
    relay_port = listener.sockets[0].getsockname()[1]
    try:
        with pytest.raises(PullFailed, match="gone"):
            remote = msgspec.structs.replace(from_elsewhere(manifest), address=f"127.0.0.1:{relay_port}")
            await pull(remote, deadline_s=PATIENCE_S, secret=SECRET)
    finally:
        with contextlib.suppress(ProcessLookupError):
            owner.kill()
        await owner.wait()
    assert_equal(await pull(manifest, deadline_s=PATIENCE_S), {"a": np.ones(1 << 24, np.uint8)})
    listener.close()
    remove_leftovers(run_key)


async def test_regions_outlive_their_owner_by_one_restart_on_its_host() -> None:
    run_key = uuid.uuid4().hex
    other = RegionServer("127.0.0.1", "cell-1", run_key)
    await other.start()
    untouched = publish(other)
    published: list[Manifest] = []
    owners = [RegionServer("127.0.0.1", "cell-0", run_key) for _ in range(3)]
    for owner in owners:
        await owner.start()
        published.append(publish(owner))
    assert [Path(manifest.path).exists() for manifest in (*published, untouched)] == [False, True, True, True]
    assert_equal(await pull(published[1], deadline_s=PATIENCE_S), ARRAYS)
    owners[1].close()
    assert [Path(manifest.path).exists() for manifest in published] == [False, False, True]
    owners[2].close()
    other.close()
    assert not region_files.run_folder(run_key).exists()
    owners[0].close()


async def test_region_files_are_private(server: RegionServer) -> None:
    path = Path(publish(server).path)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
