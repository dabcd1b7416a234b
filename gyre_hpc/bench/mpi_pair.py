"""Two MPI endpoints on this host for `gyre bench regions`: both hosts in this process, each endpoint under an mpiexec.

They join as cells of a run do (port, accept, connect, proofs), without a controller between them; regions then take the
same path: the owner's endpoint sends its file, the puller's receives into the puller's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from gyre_hpc.errors import GyreError
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.mpi.host import EndpointHost, socket_path
from gyre_hpc.transport.mpi.wire import (
    Accept,
    Dropped,
    Fetch,
    Fetched,
    Join,
    Joined,
    PortOpened,
    Ready,
    ToHost,
    Unfit,
)
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import write_secret

UP_S: Final = 60.0
JOIN_S: Final = 20.0
CHANNEL: Final = 1
LOOPBACK: Final = {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}


class NoMpi(GyreError):
    """MPI endpoints do not come up here (says why)."""


class End:
    """One host and its endpoint; `fetch` is what a backend asks of it."""

    def __init__(self, run: Path, key: str, name: str, stall_s: float) -> None:
        self.name, self._run, self._stall_s = name, run, stall_s
        self._host = EndpointHost(socket_path(key, name), JOIN_S, self._heard, self._lost)
        self.said: dict[type, asyncio.Future[ToHost]] = {}
        self._transfers: dict[int, asyncio.Future[None]] = {}
        self._serial = itertools.count(1)
        self._process: Process | None = None

    @property
    def ready(self) -> bool:
        """Whether MPI runs in the endpoint."""
        return self._host.ready

    @property
    def pid(self) -> int:
        """The endpoint's process id; 0 before there was one."""
        return self._host.pid

    async def start(self) -> None:
        """Raises NoMpi."""
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if mpiexec is None:
            raise NoMpi("no mpiexec (pip install 'gyre_hpc[mpi]')")
        await self._host.start()
        command = [
            mpiexec,
            "-iface",
            "lo",
            "-n",
            "1",
            sys.executable,
            "-m",
            "gyre_hpc.transport.mpi.endpoint",
        ]
        where = ["--run", str(self._run), "--name", self.name, "--socket", str(self._host.path)]
        limits = ["--plugin", "pmi2", "--join-s", str(JOIN_S), "--stall-s", str(self._stall_s)]
        ready = self.expect(Ready)
        log = (self._run / f"{self.name}.log").open("wb")
        with log:
            self._process = await asyncio.create_subprocess_exec(
                *(*command, *where, *limits), env=LOOPBACK | os.environ, stdout=log, stderr=log
            )
        await self._answer(ready, "no endpoint came up")

    async def close(self) -> None:
        """The endpoint leaves."""
        self._host.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), JOIN_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    def expect(self, kind: type) -> asyncio.Future[ToHost]:
        """The next message of this kind."""
        self.said[kind] = asyncio.get_running_loop().create_future()
        return self.said[kind]

    async def join(self, acceptor: End) -> None:
        """Join another end, as the puller of its regions. Raises NoMpi."""
        opened, joined, accepted = acceptor.expect(PortOpened), self.expect(Joined), acceptor.expect(Joined)
        acceptor._host.send(Accept(CHANNEL, self.name))
        port = await self._answer(opened, "no port was opened")
        assert isinstance(port, PortOpened)
        self._host.send(Join(CHANNEL, acceptor.name, port.port, port.nonce))
        await self._answer(joined, "not joined")
        await self._answer(accepted, "not accepted")

    async def fetch(self, owner: str, path: str, total: int, into: str) -> None:
        """Fill the file `into` with the region file `path` of the joined end. Raises OSError."""
        transfer = next(self._serial)
        future = self._transfers[transfer] = asyncio.get_running_loop().create_future()
        self._host.send(Fetch(CHANNEL, transfer, path, total, into))
        try:
            await future
        except asyncio.CancelledError:
            self._host.kill(f"the pull of {path} was given up")  # it might still write
            raise

    async def _answer(self, future: asyncio.Future[ToHost], what: str) -> ToHost:
        try:
            return await asyncio.wait_for(future, UP_S)
        except TimeoutError as error:
            raise NoMpi(f"{what} within {UP_S:g} s") from error

    def _heard(self, message: ToHost) -> None:
        if isinstance(message, Fetched):
            future = self._transfers.pop(message.transfer)
            if future.done():
                return
            if message.reason:
                future.set_exception(OSError(message.reason))
            else:
                future.set_result(None)
        elif isinstance(message, Unfit | Dropped):
            self._lost(message.reason)
        elif (said := self.said.pop(type(message), None)) is not None:
            said.set_result(message)

    def _lost(self, reason: str) -> None:
        for said in self.said.values():
            if not said.done():
                said.set_exception(NoMpi(reason))
        for transfer in self._transfers.values():
            if not transfer.done():
                transfer.set_exception(ConnectionError(reason))


@contextlib.asynccontextmanager
async def joined_pair(stall_s: float = JOIN_S) -> AsyncIterator[tuple[End, End, str]]:
    """Ends of an owner and of a puller that has joined it, and the key of the run to publish in. Raises NoMpi."""
    run = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    key = run_key(write_secret(RunLayout(run)))
    ends = [End(run, key, name, stall_s) for name in ("owner", "puller")]
    try:
        for end in ends:
            await end.start()
        await ends[1].join(ends[0])
        yield ends[0], ends[1], key
    finally:
        for end in ends:
            await end.close()
        shutil.rmtree(run, ignore_errors=True)
