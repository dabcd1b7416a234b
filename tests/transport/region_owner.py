"""An owner of regions as a process of its own: `region_owner.py KIND OWNER RUN_KEY`, told by JSON lines what to do.

["publish", NAME, BYTES] answers a manifest; ["drop", MANIFEST] and ["flip", MANIFEST, OFFSET] answer null. Ends at the
end of its input.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from typing import Any

import msgspec
import numpy as np

from gyre_hpc.transport.backend import Backend
from gyre_hpc.transport.backends import make_backends
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.mpi.backend import MpiBackend
from gyre_hpc.transport.regions import RegionServer

SECRET = b"s" * 32


@functools.cache
def arrays_of(size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Three fragments of `size` bytes and more together; of 0 bytes for size 0."""
    numbers = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    return {"numbers": numbers, "none": np.empty((0, 3), np.float32), "half": numbers[: size // 2]}


class Elsewhere:
    """The MPI side of an owner whose endpoint is somebody else's to start."""

    ready = False

    async def fetch(self, owner: str, path: str, total: int, into: str) -> None:
        raise OSError("an owner fetches nothing")


def backends_of(kind: str, owner: str) -> list[Backend]:
    return (
        [MpiBackend(owner, Elsewhere())] if kind == "mpi" else make_backends(kind, "127.0.0.1", owner, SECRET)
    )


async def main(kind: str, owner: str, run_key: str) -> None:
    backends = backends_of(kind, owner)
    server = RegionServer("127.0.0.1", owner, run_key, secret=SECRET, backends=backends)
    await server.start()
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        verb, what, *more = msgspec.json.decode(line)
        answer: Manifest | None = None
        if verb == "publish":
            answer = server.publish(RegionKind.WEIGHTS, what, 3, "layout", arrays_of(*more))
        elif verb == "drop":
            server.drop(msgspec.convert(what, Manifest))
        elif verb == "flip":
            _flip(msgspec.convert(what, Manifest).path, *more)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.flush()
    server.close()


def _flip(path: str, offset: int) -> None:
    """Turn one bit of the region's file around, in place."""
    file = os.open(path, os.O_RDWR)
    os.pwrite(file, bytes([os.pread(file, 1, offset)[0] ^ 1]), offset)
    os.close(file)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
