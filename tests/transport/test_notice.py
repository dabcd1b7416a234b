"""What SIGTERM does to a peer: the end on one machine, a message under Slurm while a controller is there to judge it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import Link, LinkServer, write_rendezvous, write_secret
from gyre_hpc.transport.messages import AskedToEnd, Hello, PeerKind, Shutdown
from gyre_hpc.transport.notice import heed_signals

PATIENCE_S = 30.0


@pytest.mark.parametrize("kind", ["local", "slurm"])
async def test_sigterm_is_passed_on_under_slurm_until_the_controller_says_shutdown(
    tmp_path: Path, kind: str
) -> None:
    layout = RunLayout(tmp_path)
    server = LinkServer(write_secret(layout), 1, "127.0.0.1")
    write_rendezvous(layout, *await server.start(), 1)
    hello = Hello(PeerKind.RUNNER, 0, 1, "here", "")
    link = await Link.connect(layout, hello, 0, heartbeat_s=60.0, timeout_s=PATIENCE_S)
    theirs, ended = await server.accept(), asyncio.Event()
    heed_signals(ClusterConfig(kind=kind), lambda: link, ended.set)
    os.kill(os.getpid(), signal.SIGTERM)
    if kind == "slurm":
        assert await asyncio.wait_for(theirs.receive(), PATIENCE_S) == AskedToEnd("SIGTERM")
        assert not ended.is_set()
        theirs.send(Shutdown("told"))
        await link.receive()
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(ended.wait(), PATIENCE_S)
    await link.close()
    await server.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_without_a_link_a_signal_ends_the_peer(number: signal.Signals) -> None:
    ended = asyncio.Event()
    heed_signals(ClusterConfig(kind="slurm"), lambda: None, ended.set)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(ended.wait(), PATIENCE_S)
