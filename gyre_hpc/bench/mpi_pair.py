"""Two joined MPI endpoints on this host for `gyre bench regions`: both hosts in this process, each endpoint under an mpiexec."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.mpi.pair import JOIN_S, End, NoMpi
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import write_secret

ENVIRONMENT: Final = {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
"""Loopback only, over the network module that moves regions fastest on one host."""


@contextlib.asynccontextmanager
async def joined_pair(stall_s: float = JOIN_S) -> AsyncIterator[tuple[End, End, str]]:
    """Ends of an owner and of a puller that has joined it, and the key of the run to publish in. Raises NoMpi."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpiexec is None:
        raise NoMpi("no mpiexec (pip install 'gyre_hpc[mpi]')")
    run = Path(tempfile.mkdtemp(prefix="gyre-bench-"))
    key = run_key(write_secret(RunLayout(run)))
    owner, puller = (End(run, key, name, stall_s) for name in ("owner", "puller"))
    endpoints: list[Process] = []
    try:
        for end in (owner, puller):
            await end.listen()
            endpoints.append(await _start(mpiexec, end, run))
        for end in (owner, puller):
            await end.up()
        await puller.join(await owner.invite(puller.name))
        await owner.joined()
        yield owner, puller, key
    finally:
        owner.close()
        puller.close()
        for endpoint in endpoints:
            await _ended(endpoint)
        shutil.rmtree(run, ignore_errors=True)


async def _start(mpiexec: str, end: End, run: Path) -> Process:
    command = [mpiexec, "-iface", "lo", "-n", "1", sys.executable, *end.arguments()]
    with (run / f"{end.name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log
        )


async def _ended(endpoint: Process) -> None:
    try:
        await asyncio.wait_for(endpoint.wait(), JOIN_S)
    except TimeoutError:
        endpoint.kill()
        await endpoint.wait()
