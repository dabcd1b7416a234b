"""`gyre bench regions`: a region of 64 MiB from one process to another of this host, checksums on, over a memcpy of its bytes.

A round times one pull by each way and one memcpy in turns; a figure is the median over the rounds of memcpy seconds /
pull seconds. A pull is what the puller waits for: from the call until it has arrays of its own whose checksums were compared
with the manifest. Publication (copy into the region's file and checksums, once for all pullers) is timed beside it. The
ways: shm maps the owner's file; tcp, mpi and nixl are the network ways, over loopback or what shared memory the library
chooses. Both the memcpy and, after the first rounds, the pulls go into memory that was touched before: a puller uses the
memory of dropped regions again, in a run as here. A way that cannot run here is left out with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_hpc.bench.figure import Figure
from gyre_hpc.errors import GyreError
from gyre_hpc.transport.backend import Backend
from gyre_hpc.transport.backends import make_backends
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.regions import SAME_HOST, RegionServer, remove_leftovers

Array = npt.NDArray[Any]
REGION_BYTES: Final = 64 << 20
FRAGMENTS: Final = 16
ROUNDS: Final = 15
WARM_ROUNDS: Final = 2
DEADLINE_S: Final = 60.0
SECRET: Final = b"bench" * 8
WAYS: Final = {"shm": SAME_HOST, "tcp": "sockets", "mpi": "mpi", "nixl": "nixl"}
"""Figure prefix -> the way as region servers count it."""
AIMS: Final = {"shm": 0.4, "tcp": 0.1, "mpi": 0.35}


class LeftOut(GyreError):
    """A way cannot run here."""


def region(total: int = REGION_BYTES) -> dict[str, Array]:
    """The arrays: random, as weights look to a network."""
    data = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    return {f"weight-{i}": part.view(np.float32) for i, part in enumerate(np.split(data, FRAGMENTS))}


def run() -> dict[str, Figure]:
    """All ways that run here, in turns."""
    return asyncio.run(measure(REGION_BYTES, ROUNDS))


async def measure(total: int, rounds: int) -> dict[str, Figure]:
    """The figures of a region of `total` bytes."""
    async with contextlib.AsyncExitStack() as stack:
        pulls: dict[str, Callable[[], Any]] = {}
        for name in WAYS:
            try:
                pulls[name] = await stack.enter_async_context(pulling(name, total))
            except LeftOut as error:
                sys.stdout.write(f"{name}_over_memcpy left out: {error.message}\n")
        seconds = await _rounds(pulls, total, rounds)
    return figures(seconds, total)


async def _rounds(pulls: Mapping[str, Callable[[], Any]], total: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, of publication and of the memcpy, by round."""
    source = region(total)
    target = {name: np.zeros_like(array) for name, array in source.items()}
    owner = RegionServer("127.0.0.1", "publisher", uuid.uuid4().hex, secret=SECRET)
    await owner.start()
    seconds: dict[str, list[float]] = {name: [] for name in (*pulls, "publish", "memcpy")}
    for number in range(WARM_ROUNDS + rounds):
        took = {name: await _timed(pull) for name, pull in pulls.items()}
        began = time.perf_counter()
        manifest = owner.publish(RegionKind.WEIGHTS, "policy", number, "", source)
        took["publish"] = time.perf_counter() - began
        owner.drop(manifest)
        began = time.perf_counter()
        for name, array in source.items():
            np.copyto(target[name], array)
        took["memcpy"] = time.perf_counter() - began
        if number >= WARM_ROUNDS:
            for name, value in took.items():
                seconds[name].append(value)
    owner.close()
    return seconds


async def _timed(pull: Callable[[], Any]) -> float:
    began = time.perf_counter()
    arrays = await pull()
    took = time.perf_counter() - began
    del arrays
    return took


def figures(seconds: Mapping[str, list[float]], total: int) -> dict[str, Figure]:
    """Ratios to the memcpy of the same round, and the memcpy itself."""
    memcpy = seconds["memcpy"]
    rate = total / statistics.median(memcpy) / 1e9
    found: dict[str, Figure] = {}
    for name, values in seconds.items():
        if name == "memcpy":
            continue
        ratio = statistics.median(copy / value for copy, value in zip(memcpy, values, strict=True))
        mine = total / statistics.median(values) / 1e9
        against = f"memcpy of the same {total >> 20} MiB at {rate:.1f} GB/s (this way: {mine:.2f} GB/s)"
        found[f"{name}_over_memcpy"] = Figure(ratio, "ratio", "higher", AIMS.get(name), None, against)
    return found


@contextlib.asynccontextmanager
async def pulling(name: str, total: int) -> AsyncIterator[Callable[[], Any]]:
    """A pull by this way from an owner in a process of its own. Raises LeftOut."""
    way = WAYS[name]
    async with contextlib.AsyncExitStack() as stack:
        key, backends = await _puller_side(name, stack)
        manifest = await stack.enter_async_context(_owner(way, key, total))
        if name == "mpi":
            manifest = msgspec.structs.replace(manifest, ways={way: "owner"})
        puller = RegionServer(
            "127.0.0.1", "puller", key, secret=SECRET, backends=backends, same_host=name == "shm"
        )
        try:
            await puller.start()
            await puller.pull(manifest, deadline_s=DEADLINE_S)
            if puller.ways != {way: 1}:
                raise LeftOut(f"the pull did not go by {way} here ({dict(puller.ways)})")
            yield lambda: puller.pull(manifest, deadline_s=DEADLINE_S)
        finally:
            puller.close()
            remove_leftovers(key)


async def _puller_side(name: str, stack: contextlib.AsyncExitStack) -> tuple[str, list[Backend]]:
    """Key of the run, backends of the puller. Two MPI endpoints beside this process play those of owner and puller."""
    if name != "mpi":
        return uuid.uuid4().hex, make_backends(WAYS[name], "127.0.0.1", "puller", SECRET)
    from gyre_hpc.bench.mpi_pair import joined_pair
    from gyre_hpc.transport.mpi.backend import MpiBackend

    try:
        _, end, key = await stack.enter_async_context(joined_pair())
    except (GyreError, OSError) as error:
        raise LeftOut(str(error)) from error
    return key, [MpiBackend("puller", end)]


@contextlib.asynccontextmanager
async def _owner(way: str, key: str, total: int) -> AsyncIterator[Manifest]:
    """The manifest of the region another process has published; it ends with the block."""
    command = (sys.executable, "-m", "gyre_hpc.bench.regions", way, key, str(total))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise LeftOut("its owner process did not start")
        yield msgspec.json.decode(line, type=Manifest)
    finally:
        process.stdin.close()
        await process.wait()


async def own(way: str, key: str, total: int) -> None:
    """The owner's process: publish, say the manifest, stay until the input ends."""
    backends = make_backends(way, "127.0.0.1", "owner", SECRET) if way != SAME_HOST else []
    server = RegionServer("127.0.0.1", "owner", key, secret=SECRET, backends=backends)
    await server.start()
    manifest = server.publish(RegionKind.WEIGHTS, "policy", 0, "", region(total))
    sys.stdout.buffer.write(msgspec.json.encode(manifest) + b"\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.bench.regions", description=own.__doc__)
    parser.add_argument("way")
    parser.add_argument("key")
    parser.add_argument("total", type=int)
    given = parser.parse_args()
    asyncio.run(own(given.way, given.key, given.total))
