"""Two nodes of the acceptance job: how fast a region comes from one to the other by each way; and what that means for runs.

`python -m gyre_hpc.launch.doctor.accept_regions FOLDER OWNER PULLER`, one task on each node: the owner publishes a region and
writes its manifest into the shared folder, the puller pulls it several times by each way, checksums and all, and writes
what it measured. `choose` names the best way that passed: not what is installed, but what moved bytes.
"""

from __future__ import annotations

import argparse
import asyncio
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
from gyre_hpc.files import replace_file
from gyre_hpc.launch.doctor.ask import Answer
from gyre_hpc.launch.doctor.site import Finding, ok, warning
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport import nixl_agent
from gyre_hpc.transport.backend import Backend
from gyre_hpc.transport.backends import make_backends
from gyre_hpc.transport.hosts import AUTO
from gyre_hpc.transport.messages import Manifest, RegionKind
from gyre_hpc.transport.mpi.backend import MpiBackend
from gyre_hpc.transport.mpi.pair import UP_S, End, Invitation
from gyre_hpc.transport.regions import RegionServer, remove_leftovers, run_key
from gyre_hpc.transport.rendezvous import read_secret

T = TypeVar("T")
REGION_BYTES: Final = 64 << 20
PULLS: Final = 5
"""After one that sets up connections."""
MEET_S: Final = 60.0
PULL_S: Final = 20.0
OWN_S: Final = MEET_S + UP_S + 9 * PULL_S
POLL_S: Final = 0.05
OWNER, PULLER = "owner", "puller"
MANIFEST, INVITATION = "region.json", "region-invitation.json"
MEASURED, OVER = "region-measured.json", "region-over"
DEVICES: Final = Path("/sys/class/infiniband")
"""RDMA devices of a Linux host: InfiniBand and RoCE; Slingshot's do not appear here."""
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


def devices() -> list[str]:
    return sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []


async def own(
    folder: Path, secret: bytes, node: str, total: int, meet_s: float, *, mpi: bool = False
) -> None:
    """Publish, say so, stay until the other is done. `mpi`: an endpoint is started beside this process."""
    backends = make_backends("nixl", AUTO, OWNER, secret) if nixl_agent.installed() else []
    key = run_key(secret)
    server = RegionServer(AUTO, OWNER, key, secret=secret, backends=backends)
    end = End(folder, key, OWNER) if mpi else None
    try:
        await server.start()
        if end is not None:
            await end.listen()
        arrays = {"region": np.random.default_rng(0).integers(0, 256, total, np.uint8)}
        manifest = server.publish(RegionKind.WEIGHTS, "accept", 0, "", arrays)
        replace_file(folder / MANIFEST, msgspec.json.encode((manifest, node, devices())))
        inviting = asyncio.ensure_future(_invite(folder, end))
        await _until(lambda: (folder / OVER).exists() or None, meet_s)
        inviting.cancel()
        await asyncio.wait([inviting])
    finally:
        if end is not None:
            end.close()
        server.close()
        remove_leftovers(key)


async def _invite(folder: Path, end: End | None) -> None:
    """The invitation, or why there is none, into the folder."""
    if end is None:
        return
    try:
        await end.up()
        said: tuple[Invitation | None, str] = (await end.invite(PULLER), "")
    except GyreError as error:
        said = (None, f"owner: {error.message}")
    replace_file(folder / INVITATION, msgspec.json.encode(said))


async def measure(folder: Path, secret: bytes, node: str, meet_s: float, *, mpi: bool = False) -> Measured:
    """Pull by each way; also told to the folder. Raises GyreError where the owner does not come.

    `mpi`: an endpoint is started beside this process.
    """
    end = End(folder, run_key(secret), PULLER) if mpi else None
    try:
        if end is not None:
            await end.listen()
        return await _measure(folder, secret, node, meet_s, end)
    finally:
        if end is not None:
            end.close()
        remove_leftovers(run_key(secret))


async def _measure(folder: Path, secret: bytes, node: str, meet_s: float, end: End | None) -> Measured:
    content = await _until(lambda: _bytes(folder / MANIFEST), meet_s)
    if content is None:
        raise GyreError("the owner's manifest did not appear in time")
    manifest, owner, theirs = msgspec.json.decode(content, type=tuple[Manifest, str, list[str]])
    ways = {name: await _pulled(name, manifest, secret) for name in ("sockets", "nixl")}
    ways["mpi"] = await _joined(folder, manifest, end, meet_s)
    found = Measured(ways, {owner: theirs, node: devices()})
    replace_file(folder / MEASURED, msgspec.json.encode(found))
    replace_file(folder / OVER, b"")
    return found


async def _pulled(name: str, manifest: Manifest, secret: bytes) -> Way:
    if name == "nixl" and not nixl_agent.installed():
        return Way(why=f"not installed ({nixl_agent.INSTALL})")
    if name != "sockets" and name not in manifest.ways:
        return Way(why="the owner does not offer it: see the job's log")
    backends = make_backends(name, AUTO, PULLER, secret)
    for backend in backends:
        try:
            await backend.start()
        except GyreError as error:
            return Way(why=error.message)
    return await _timed(name, manifest, secret, backends)


async def _joined(folder: Path, manifest: Manifest, end: End | None, meet_s: float) -> Way:
    """Regions by MPI, where the endpoints of both join."""
    if end is None:
        return Way(why="no MPI library that srun starts")
    try:
        await end.up()
        content = await _until(lambda: _bytes(folder / INVITATION), meet_s)
        invitation, why = msgspec.json.decode(
            content or b'[null, "no invitation came"]', type=tuple[Invitation | None, str]
        )
        if invitation is None:
            return Way(why=why)
        await end.join(invitation)
    except GyreError as error:
        return Way(why=error.message)
    manifest = msgspec.structs.replace(manifest, ways={"mpi": OWNER})
    return await _timed("mpi", manifest, b"", [MpiBackend(PULLER, end)])


async def _timed(name: str, manifest: Manifest, secret: bytes, backends: list[Backend]) -> Way:
    puller = RegionServer(AUTO, PULLER, "", secret=secret, backends=backends, same_host=False)
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
    found.append(_mpi(measured.ways["mpi"], pair))
    if nixl.why:
        return [*found, ok("region nixl", f"{pair}: {nixl.why}; runs use another way")]
    rdma = ", ".join(f"{node}: {' '.join(names)}" for node, names in measured.devices.items() if names)
    text = f"{pair}: {nixl.gb_per_s:.2f} GB/s ({f'RDMA devices {rdma}' if rdma else 'no RDMA device'})"
    return [*found, ok("region nixl", text)]


def _mpi(way: Way, pair: str) -> Finding:
    if way.why:
        return ok("region mpi", f"{pair}: {way.why}; runs use another way")
    return ok("region mpi", f"{pair}: separately started steps joined, {way.gb_per_s:.2f} GB/s")


def choose(measured: Measured | None) -> str:
    """`nixl` where an RDMA read passed and beat TCP, `mpi` where separately started steps joined, else `sockets`."""
    if measured is None:
        return "sockets"
    tcp, nixl = measured.ways["sockets"], measured.ways["nixl"]
    rdma = all(measured.devices.values()) and bool(measured.devices)
    if not nixl.why and rdma and nixl.gb_per_s > FASTER * tcp.gb_per_s:
        return "nixl"
    return "sockets" if measured.ways["mpi"].why else "mpi"


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
    parser = argparse.ArgumentParser(
        prog="python -m gyre_hpc.launch.doctor.accept_regions", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="the meeting's folder; holds the secret")
    parser.add_argument("owner", help="name of the node that owns the region")
    parser.add_argument("puller", help="name of the node that pulls it")
    parser.add_argument("--mpi", action="store_true", help="MPI endpoints are started beside both")
    args = parser.parse_args(argv)
    secret = read_secret(RunLayout(args.folder))
    node = env.get("SLURMD_NODENAME", args.owner)
    try:
        if node == args.owner:
            asyncio.run(own(args.folder, secret, node, REGION_BYTES, OWN_S, mpi=args.mpi))
        else:
            asyncio.run(measure(args.folder, secret, node, MEET_S, mpi=args.mpi))
    except GyreError as error:
        sys.stderr.write(f"{node}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
