"""The contract of region backends: every one passes all of this, between two processes, over the network way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from gyre_hpc.bench.mpi_pair import joined_pair
from gyre_hpc.transport.backend import Backend, Room, WayFailed
from gyre_hpc.transport.backends import make_backends
from gyre_hpc.transport.messages import Manifest
from gyre_hpc.transport.mpi.backend import MpiBackend
from gyre_hpc.transport.regions import PullFailed, RegionServer, remove_leftovers

sys.path.insert(0, str(Path(__file__).parent))
from region_owner import SECRET, arrays_of

KINDS = [
    pytest.param("sockets", id="sockets"),
    pytest.param("nixl", id="nixl", marks=pytest.mark.nixl),
    pytest.param("mpi", id="mpi", marks=pytest.mark.mpi),
]
PATIENCE_S = 60.0
STALL_S = 3.0
"""An MPI library may say nothing of a dead peer: its region then has to move within this."""
SMALL, LARGE = 100_000, 1 << 24
"""Bytes of regions; LARGE takes any way long enough to be interrupted."""


class Owner:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: int) -> None:
        self.process = process
        self.endpoint = endpoint
        """Process id of its MPI endpoint, 0 without one."""

    async def ask(self, *command: object) -> Manifest | None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")
        return msgspec.json.decode(await self.process.stdout.readline(), type=Manifest | None)

    async def publish(self, name: str, size: int) -> Manifest:
        manifest = await self.ask("publish", name, size)
        assert manifest is not None
        return manifest

    def signal(self, number: signal.Signals) -> None:
        """To the owner and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if self.endpoint:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.endpoint, number)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Stage(NamedTuple):
    """Where owner and puller meet: key of the run, the puller's backends, the owner's MPI endpoint."""

    key: str
    backends: list[Backend]
    endpoint: int = 0


@pytest_asyncio.fixture
async def stage(kind: str) -> AsyncIterator[Stage]:
    if kind != "mpi":
        yield Stage(uuid.uuid4().hex, make_backends(kind, "127.0.0.1", "cell-1", SECRET))
        return
    async with joined_pair(STALL_S) as (owner, puller, key):
        yield Stage(key, [MpiBackend("cell-1", puller)], owner.pid)


@pytest_asyncio.fixture
async def owner(kind: str, stage: Stage) -> AsyncIterator[Owner]:
    script = str(Path(__file__).with_name("region_owner.py"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, kind, "cell-0", stage.key),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    owner = Owner(process, stage.endpoint)
    yield owner
    owner.signal(signal.SIGKILL)
    await process.wait()
    remove_leftovers(stage.key)


@pytest_asyncio.fixture
async def puller(stage: Stage) -> AsyncIterator[RegionServer]:
    puller = RegionServer(
        "127.0.0.1", "cell-1", stage.key, secret=SECRET, backends=stage.backends, same_host=False
    )
    await puller.start()
    yield puller
    puller.close()


def assert_whole(got: dict[str, Any], size: int) -> None:
    expected = arrays_of(size)
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert np.array_equal(got[name], array) and got[name].shape == array.shape


@pytest.mark.parametrize("size", [1, SMALL])
async def test_a_pull_is_whole_and_bit_equal(
    owner: Owner, puller: RegionServer, kind: str, size: int
) -> None:
    got = await puller.pull(await owner.publish("policy", size), deadline_s=PATIENCE_S)
    assert_whole(got, size)
    assert puller.ways == {kind: 1}
    got["numbers"][0] ^= 1  # private to the puller


async def test_arrays_of_no_bytes_are_pulled(owner: Owner, puller: RegionServer, kind: str) -> None:
    assert_whole(await puller.pull(await owner.publish("policy", 0), deadline_s=PATIENCE_S), 0)
    assert puller.ways == {kind: 1}


async def test_pulls_at_once_do_not_mix(owner: Owner, puller: RegionServer, kind: str) -> None:
    sizes = [SMALL, SMALL + 1, 3 * SMALL]
    manifests = [await owner.publish(f"region-{size}", size) for size in sizes]
    pulls = [puller.pull(manifest, deadline_s=PATIENCE_S) for manifest in [*manifests, *manifests]]
    for size, got in zip([*sizes, *sizes], await asyncio.gather(*pulls), strict=True):
        assert_whole(got, size)
    assert puller.ways == {kind: 6}


async def test_a_flipped_bit_is_refused_and_the_target_left_alone(owner: Owner, puller: RegionServer) -> None:
    manifest = await owner.publish("policy", SMALL)
    await owner.ask("flip", manifest, SMALL // 2)
    target = {name: np.full_like(array, 5) for name, array in arrays_of(SMALL).items()}
    with pytest.raises(PullFailed, match="'numbers': checksum"):
        await puller.pull(manifest, deadline_s=PATIENCE_S, into=target)
    assert all((array == 5).all() for array in target.values())


async def test_a_dropped_region_is_refused_with_the_reason(
    owner: Owner, puller: RegionServer, kind: str
) -> None:
    manifest, other = await owner.publish("policy", SMALL), await owner.publish("other", SMALL)
    await owner.ask("drop", manifest)
    await owner.ask("drop", manifest)
    with pytest.raises(PullFailed, match="dropped"):
        await puller.pull(manifest, deadline_s=PATIENCE_S)
    for backend in make_backends(kind, "127.0.0.1", "cell-2", SECRET):
        await backend.start()
        with pytest.raises(WayFailed, match="dropped"):
            await backend.fetch(manifest, Room(manifest.fragments), time.monotonic() + PATIENCE_S)
        backend.close()
    assert_whole(await puller.pull(other, deadline_s=PATIENCE_S), SMALL)


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.1])
async def test_an_owner_that_dies_costs_the_pull_but_never_half_of_it(
    owner: Owner, puller: RegionServer, delay_s: float
) -> None:
    manifest = await owner.publish("policy", LARGE)
    pulling = asyncio.ensure_future(puller.pull(manifest, deadline_s=PATIENCE_S))
    await asyncio.sleep(delay_s)
    owner.signal(signal.SIGKILL)
    try:
        assert_whole(await pulling, LARGE)
    except PullFailed as error:
        assert "gone" in error.reason  # known at once, not by the deadline
    with pytest.raises(PullFailed, match="gone"):
        await puller.pull(manifest, deadline_s=PATIENCE_S)


async def test_a_pull_ends_at_its_deadline(owner: Owner, puller: RegionServer) -> None:
    manifest = await owner.publish("policy", SMALL)
    owner.signal(signal.SIGSTOP)
    with pytest.raises(PullFailed, match=r"within 0\.2 s"):
        await puller.pull(manifest, deadline_s=0.2)
    owner.signal(signal.SIGCONT)
    assert_whole(await puller.pull(manifest, deadline_s=PATIENCE_S), SMALL)


async def test_a_pull_that_is_cancelled_leaves_nothing_behind(owner: Owner, puller: RegionServer) -> None:
    manifest = await owner.publish("policy", LARGE)
    for delay_s in (0.0, 0.002, 0.01):
        pulling = asyncio.ensure_future(puller.pull(manifest, deadline_s=PATIENCE_S))
        await asyncio.sleep(delay_s)
        pulling.cancel()
        await asyncio.wait([pulling])
    assert_whole(await puller.pull(manifest, deadline_s=PATIENCE_S), LARGE)
