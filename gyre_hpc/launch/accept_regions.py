"""Two nodes of the acceptance job: how fast a region comes from one to the other by each way; and what that means for runs.

`python -m gyre_hpc.launch.accept_regions FOLDER OWNER PULLER`, one task on each node: the owner publishes a region and
writes its manifest into the shared folder, the puller pulls it several times by each way, checksums and all, and writes
what it measured. `choose` names the best way that passed: not what is installed, but what moved bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from gyre_hpc.errors import GyreError
from gyre_hpc.launch.doctor_ask import Answer
from gyre_hpc.launch.site import Finding, State, ok, warning, write_whole
from gyre_hpc.transport import nixl_agent
from gyre_hpc.transport.backends import make_backends
from gyre_hpc.transport.hosts import AUTO
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.regions import RegionServer, remove_leftovers

T = TypeVar("T")
REGION_BYTES: Final = 64 << 20
PULLS: Final = 5
"""After one that sets up connections."""
MEET_S: Final = 60.0
PULL_S: Final = 20.0
POLL_S: Final = 0.05
MANIFEST, MEASURED, OVER = "region.json", "region-measured.json", "region-over"
DEVICES: Final = Path("/sys/class/infiniband")
"""RDMA devices of a Linux host: InfiniBand and RoCE; Slingshot's do not appear here."""
MPI_JOIN: Final = "mpi join"
"""The finding that says whether separately started MPI steps join and move regions here."""
FASTER: Final = 1.2
"""A one-sided read must beat TCP by this much: by less it is noise."""


class Way(msgspec.Struct, frozen=True):
    """GB/s of one way, or why it did not pass."""

    gb_per_s: float = 0.0
    why: str = ""


class Measured(msgspec.Struct, frozen=True):
    """Ways by backend name; the RDMA devices that both nodes have by number of ports seen on either ("" = none)."""

    ways: dict[str, Way]
    devices: dict[str, list[str]]


def owner_key(folder: Path) -> str:
    """Names the regions of this meeting; both nodes find the same."""
    return hashlib.sha256(bytes(folder.absolute())).hexdigest()[:16]


def devices() -> list[str]:
    return sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []


async def own(folder: Path, secret: bytes, node: str, total: int, meet_s: float) -> None:
    """Publish, say so, stay until the other is done."""
    backends = make_backends("nixl", AUTO, "owner", secret) if nixl_agent.installed() else []
    key = owner_key(folder)
    server = RegionServer(AUTO, "owner", key, secret=secret, backends=backends)
    try:
        await server.start()
        arrays = {"region": np.random.default_rng(0).integers(0, 256, total, np.uint8)}
        manifest = server.publish(RegionKind.WEIGHTS, "accept", 0, "", arrays)
        write_whole(folder / MANIFEST, msgspec.json.encode((manifest, node, devices())))
        await _until(lambda: (folder / OVER).exists() or None, meet_s)
    finally:
        server.close()
        remove_leftovers(key)


async def measure(folder: Path, secret: bytes, node: str, meet_s: float) -> Measured:
    """Pull by each way; also told to the folder. Raises GyreError where the owner does not come."""
    content = await _until(lambda: _bytes(folder / MANIFEST), meet_s)
    if content is None:
        raise GyreError("the owner's manifest did not appear in time")
    manifest, owner, theirs = msgspec.json.decode(content, type=tuple[Manifest, str, list[str]])
    ways = {name: await _pulled(name, manifest, secret) for name in ("sockets", "nixl")}
    found = Measured(ways, {owner: theirs, node: devices()})
    write_whole(folder / MEASURED, msgspec.json.encode(found))
    write_whole(folder / OVER, b"")
    return found


async def _pulled(name: str, manifest: Manifest, secret: bytes) -> Way:
    if name == "nixl" and not nixl_agent.installed():
        return Way(why=f"not installed ({nixl_agent.INSTALL})")
    if name != "sockets" and name not in manifest.ways:
        return Way(why="the owner does not offer it: see the job's log")
    backends = make_backends(name, AUTO, "puller", secret)
    puller = RegionServer(AUTO, "puller", "", secret=secret, backends=backends, same_host=False)
    for backend in backends:
        try:
            await backend.start()
        except GyreError as error:
            return Way(why=error.message)
    seconds = []
    try:
        for _ in range(1 + PULLS):
            began = time.perf_counter()
            await puller.pull(manifest, deadline_s=PULL_S)
            seconds.append(time.perf_counter() - began)
    except GyreError as error:
        return Way(why=error.message)
    finally:
        for backend in backends:
            backend.close()
    if puller.ways != {name: 1 + PULLS}:
        return Way(why=f"pulls went by {dict(puller.ways)}: see the job's log")
    total = sum(fragment.bytes for fragment in manifest.fragments)
    return Way(total / statistics.median(seconds[1:]) / 1e9)


def read_measured(folder: Path) -> Measured | None:
    """What the puller wrote into the meeting's folder."""
    content = _bytes(folder / MEASURED)
    return None if content is None else msgspec.json.decode(content, type=Measured)


def judge_regions(measured: Measured | None, step: Answer, names: Sequence[str]) -> list[Finding]:
    """One finding per way between these two nodes."""
    pair = " to ".join(names[:2])
    if measured is None:
        fix = "see the job's log; runs pull over TCP between the addresses of finding 'network'"
        return [warning("region tcp", f"{pair}: no measurement: {step.why}", fix)]
    tcp, nixl = measured.ways["sockets"], measured.ways["nixl"]
    found = [
        warning("region tcp", f"{pair}: {tcp.why}", "open the nodes' ports to each other")
        if tcp.why
        else ok("region tcp", f"{pair}: {tcp.gb_per_s:.2f} GB/s")
    ]
    if nixl.why:
        return [*found, ok("region nixl", f"{pair}: {nixl.why}; runs use another way")]
    rdma = ", ".join(f"{node}: {' '.join(names)}" for node, names in measured.devices.items() if names)
    text = f"{pair}: {nixl.gb_per_s:.2f} GB/s ({f'RDMA devices {rdma}' if rdma else 'no RDMA device'})"
    return [*found, ok("region nixl", text)]


def choose(measured: Measured | None, findings: Sequence[Finding]) -> str:
    """`nixl` where an RDMA read passed and beat TCP, `mpi` where separately started steps joined, else `sockets`."""
    if measured is not None:
        tcp, nixl = measured.ways["sockets"], measured.ways["nixl"]
        rdma = all(measured.devices.values()) and bool(measured.devices)
        if not nixl.why and rdma and nixl.gb_per_s > FASTER * tcp.gb_per_s:
            return "nixl"
    joined = any(finding.name == MPI_JOIN and finding.state is State.OK for finding in findings)
    return "mpi" if joined else "sockets"


async def _until(probe: Callable[[], T | None], limit_s: float) -> T | None:
    deadline = time.monotonic() + limit_s
    while (found := probe()) is None and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return found


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def main(argv: list[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Owner or puller, by this task's node; exit code 1 says that the other did not come."""
    parser = argparse.ArgumentParser(prog="python -m gyre_hpc.launch.accept_regions", description=__doc__)
    parser.add_argument("folder", type=Path, help="the meeting's folder; holds the secret")
    parser.add_argument("owner", help="name of the node that owns the region")
    parser.add_argument("puller", help="name of the node that pulls it")
    args = parser.parse_args(argv)
    secret = (args.folder / "region-secret").read_bytes()
    node = env.get("SLURMD_NODENAME", args.owner)
    try:
        if node == args.owner:
            asyncio.run(own(args.folder, secret, node, REGION_BYTES, MEET_S + 8 * PULL_S))
        else:
            asyncio.run(measure(args.folder, secret, node, MEET_S))
    except GyreError as error:
        sys.stderr.write(f"{node}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
