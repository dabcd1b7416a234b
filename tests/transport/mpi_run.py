"""Two cells of a run whose MPI endpoints are processes of their own, all their hosts in one test process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gyre_hpc.config import RunConfig, TransportConfig
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.controller.peers.channels import ABOUT_CHANNELS, Channels
from gyre_hpc.controller.peers.peers import Peer
from gyre_hpc.launch.job.allocation import read_allocation
from gyre_hpc.launch.plan import Launcher, ProcessHandle, ProcessSpec
from gyre_hpc.launch.slurm import SlurmLauncher
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import Link, LinkServer, write_rendezvous, write_secret
from gyre_hpc.transport.messages import Claim, Hello, Message, PeerKind, RegionKind, WorkReady
from gyre_hpc.transport.mpi import local_pmi
from gyre_hpc.transport.mpi.backend import MpiBackend
from gyre_hpc.transport.mpi.host import socket_path
from gyre_hpc.transport.mpi.peer_side import PeerSide
from gyre_hpc.transport.regions import RegionServer, remove_leftovers, run_key
from tests.launch.cluster import PATIENCE_S, squeue

LOOPBACK = {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}


def transport(**keys: float) -> TransportConfig:
    """Short times: what is late in a test is late within seconds."""
    times = {"heartbeat_s": 0.2, "join_s": 5.0, "silent_s": 8.0, "stall_s": 3.0} | keys
    return TransportConfig(kind="mpi", same_host=False, **times)  # type: ignore[arg-type]


def allocate(nodes: int) -> tuple[str, SlurmLauncher]:
    """A job of so many nodes that sleeps, and the launcher of its steps."""
    command = ["sbatch", "--parsable", "--no-kill", f"-N{nodes}", "-c4", "--mem=4096", "-o", "/dev/null"]
    job = subprocess.check_output([*command, "--wrap", "exec sleep 1800"], text=True).strip()
    deadline = time.monotonic() + PATIENCE_S
    while squeue(job, "%T") != "RUNNING":
        assert time.monotonic() < deadline, "the job does not start"
        time.sleep(0.1)
    told = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NODELIST": squeue(job, "%N"),
        "SLURM_JOB_CPUS_PER_NODE": f"4(x{nodes})" if nodes > 1 else "4",
        "SLURM_MEM_PER_NODE": "4096",
    }
    allocation = read_allocation(told)
    assert allocation is not None
    return job, SlurmLauncher(allocation, ClusterConfig(kind="slurm"))


async def until(what: str, probe: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not probe():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


class PmiProcess:
    """A process of this host as a handle."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def kill(self) -> None:
        self.process.kill()

    async def wait(self) -> int:
        return await asyncio.to_thread(self.process.wait)


class PmiLauncher:
    """Without Slurm: endpoints are real MPI processes of this host, started by our own process manager."""

    async def start(self, spec: ProcessSpec) -> PmiProcess:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            output: dict[str, object] = {"stdout": log, "stderr": subprocess.STDOUT}
            if spec.mpi != "none":
                return PmiProcess(local_pmi.spawn(spec.argv, spec.env, **output))
            return PmiProcess(subprocess.Popen(list(spec.argv), **output))  # type: ignore[call-overload]


@dataclass
class TestPeers:
    """What channels need of the controller's peers."""

    launcher: Launcher
    peers: dict[tuple[PeerKind, int], Peer] = field(default_factory=dict)


@dataclass
class CellHost:
    """A cell leader, as far as links, channels and regions go."""

    index: int
    link: Link
    side: PeerSide
    regions: RegionServer
    step: ProcessHandle
    got: list[Message] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"cell-{self.index}"


class MpiRun:
    """Controller and cells. `faults` is what a person would read."""

    __test__ = False

    def __init__(self, folder: Path, launcher: Launcher, config: RunConfig) -> None:
        self.layout, self.config, self.launcher = RunLayout(folder), config, launcher
        self.peers = TestPeers(launcher)
        self.cells: dict[int, CellHost] = {}
        self.got: dict[int, list[Message]] = {}
        self.faults: list[str] = []
        self.incarnation = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.secret = write_secret(self.layout)
        self.server = LinkServer(self.secret, 1, "127.0.0.1")
        write_rendezvous(self.layout, *await self.server.start(), 1)
        self.channels = Channels(
            self.config,
            self.layout,
            self.secret,
            1,
            self.peers,  # type: ignore[arg-type]
            lambda who, what: self.faults.append(f"{who}: {what}"),
        )
        await self.channels.start()

    async def add_cell(self, index: int) -> CellHost:
        """A step for the cell, a link, its MPI side; the endpoint follows."""
        self.incarnation += 1
        name = f"cell-{index}"
        spec = ProcessSpec(name, ["sleep", "900"], mem="512M", log=self.layout.root / f"{name}.log")
        step = await self.launcher.start(spec)
        hello = Hello(PeerKind.CELL, index, os.getpid(), "here", "")
        link = await Link.connect(self.layout, hello, self.incarnation, heartbeat_s=0.2, timeout_s=PATIENCE_S)
        path = socket_path(run_key(self.secret), name, self.incarnation)
        side = PeerSide(link, path, self.config.transport)
        backend = MpiBackend(name, side)
        regions = RegionServer(
            "127.0.0.1", name, run_key(self.secret), secret=self.secret, backends=[backend], same_host=False
        )
        cell = self.cells[index] = CellHost(index, link, side, regions, step)
        await side.start()
        await regions.start()
        cell.tasks.append(asyncio.create_task(self._cell_reads(cell)))
        peer_link = await self.server.accept()
        peer = self.peers.peers[PeerKind.CELL, index] = Peer(PeerKind.CELL, index, link=peer_link)
        self.got[index] = []
        self.channels.connected(peer.id)
        self._tasks.append(asyncio.create_task(self._controller_reads(peer)))
        return cell

    async def remove_cell(self, index: int) -> None:
        """As if its process had been killed: nothing is said."""
        cell = self.cells.pop(index)
        for task in cell.tasks:
            task.cancel()
        cell.step.kill()
        await cell.step.wait()
        self.channels.exited((PeerKind.CELL, index))
        self.peers.peers[PeerKind.CELL, index].link = None
        cell.side.close()
        cell.regions.close()
        await cell.link.close()

    async def joined(self, *indices: int) -> None:
        """Both sides use MPI."""
        await until("the channels", lambda: all(self.up(index) for index in indices))

    def up(self, index: int) -> bool:
        link = self.peers.peers[PeerKind.CELL, index].link
        return link is not None and link.channel.is_open and self.cells[index].link.channel.is_open

    def talk(self, index: int, first: int, last: int) -> None:
        """Numbered messages both ways."""
        link = self.peers.peers[PeerKind.CELL, index].link
        assert link is not None
        for number in range(first, last):
            link.send(WorkReady(number))
            self.cells[index].link.send(Claim(number))

    async def heard(self, index: int, count: int) -> None:
        """All of `count` messages, once each and in order, at both ends."""
        cell = self.cells[index]
        await until("all messages", lambda: len(self.got[index]) >= count and len(cell.got) >= count)
        assert self.got[index] == [Claim(number) for number in range(count)]
        assert cell.got == [WorkReady(number) for number in range(count)]

    def carried(self, index: int) -> int:
        """Messages of both directions that were given to MPI."""
        link = self.peers.peers[PeerKind.CELL, index].link
        assert link is not None
        return link.channel.carried + self.cells[index].link.channel.carried

    def endpoint_pid(self, name: str) -> int:
        host = self.channels._bridge if name == "controller" else self.cells[int(name[5:])].side._host
        return host._pid

    async def close(self) -> None:
        for index in list(self.cells):
            await self.remove_cell(index)
        await self.channels.close()
        for task in self._tasks:
            task.cancel()
        await self.server.close()

    async def _cell_reads(self, cell: CellHost) -> None:
        while (message := await cell.link.receive()) is not None:
            if not cell.side.told(message):
                cell.got.append(message)

    async def _controller_reads(self, peer: Peer) -> None:
        link = peer.link
        assert link is not None
        while (message := await link.receive()) is not None:
            if isinstance(message, ABOUT_CHANNELS):
                self.channels.said(peer.id, message)
            else:
                self.got[peer.index].append(message)


@contextlib.asynccontextmanager
async def mpi_run(
    launcher: Launcher, config: RunConfig | None = None, cells: int = 2
) -> AsyncIterator[MpiRun]:
    """A run in a folder of its own, torn down whatever happens."""
    folder = Path("/tmp") / f"gyre-mpi-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    if config is None:
        config = RunConfig(cluster=ClusterConfig(kind="slurm", mpi_env=dict(LOOPBACK)), transport=transport())
    run = MpiRun(folder, launcher, config)
    await run.start()
    try:
        for index in range(cells):
            await run.add_cell(index)
        yield run
    finally:
        await run.close()
        remove_leftovers(run_key(run.secret))
        shutil.rmtree(folder)


async def check_exchange(run: MpiRun) -> None:
    """Messages and a region cross MPI; the bridge is killed: nothing is lost, nothing comes twice, and the cells join again."""
    await run.joined(0, 1)
    for index in (0, 1):
        run.talk(index, 0, 50)
        await run.heard(index, 50)
        assert run.carried(index) >= 100
    owner, puller = run.cells[0].regions, run.cells[1].regions
    weights = {"w": np.random.default_rng(0).random(3_000_000), "none": np.empty((0, 2))}
    manifest = owner.publish(RegionKind.WEIGHTS, "policy", 1, "", weights)
    arrays = await puller.pull(manifest, deadline_s=PATIENCE_S)
    np.testing.assert_array_equal(arrays["w"], weights["w"])
    assert puller.ways == {"mpi": 1}
    run.talk(0, 50, 60)
    os.kill(run.endpoint_pid("controller"), signal.SIGKILL)
    run.talk(0, 60, 90)
    await until("the downgrade", lambda: not run.up(0) and not run.up(1))
    run.talk(0, 90, 100)
    await run.heard(0, 100)
    assert any("cell-1: MPI channel lost" in fault for fault in run.faults)
    await run.joined(0, 1)
    run.talk(0, 100, 110)
    await run.heard(0, 110)
