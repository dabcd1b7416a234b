"""`gyre services RUN`: one owner of gateway and runner, which come back after a death and end when the run does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from gyre_hpc import models
from gyre_hpc.config import RunConfig, save_run_config
from gyre_hpc.launch.elsewhere.services import read_service
from gyre_hpc.launch.incarnations import INCARNATIONS_PER_LAUNCH, LAUNCHES_PER_EPOCH
from gyre_hpc.launch.owner import RELEASED
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import LinkServer, PeerLink, write_rendezvous, write_secret
from gyre_hpc.transport.messages import Holding, PeerKind, Shutdown

PATIENCE_S = 120.0
REPO = Path(__file__).parents[2]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[tuple[RunLayout, LinkServer]]:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    layout.create()
    layout.model.symlink_to(models.resolve("package:patchkit"))
    config = RunConfig()
    config.model.path, config.cluster.runners = "x", "external"
    config.tasks.sandbox, config.trust_tasks = "none", True
    save_run_config(config, layout.root)
    server = LinkServer(write_secret(layout), 1, "127.0.0.1")
    write_rendezvous(layout, *await server.start(), 1)
    yield layout, server
    await server.close()


async def services(layout: RunLayout) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "gyre_hpc.cli", "services", str(layout.root)]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    return await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.PIPE)


async def met(server: LinkServer) -> PeerLink:
    link = await asyncio.wait_for(server.accept(), PATIENCE_S)
    assert await link.receive() == Holding(())
    return link


def launch_of(link: PeerLink) -> tuple[int, int]:
    """(number of the owner, number of the launch)."""
    return divmod(link.incarnation // INCARNATIONS_PER_LAUNCH, LAUNCHES_PER_EPOCH)


async def test_both_are_served_replaced_and_ended(run: tuple[RunLayout, LinkServer]) -> None:
    layout, server = run
    process = await services(layout)
    links = {link.hello.kind: link for link in (await met(server), await met(server))}
    assert set(links) == {PeerKind.GATEWAY, PeerKind.RUNNER}
    second = await services(layout)
    _, errors = await asyncio.wait_for(second.communicate(), PATIENCE_S)
    assert second.returncode == 3 and f"pid {process.pid}" in errors.decode()
    record = read_service(layout, PeerKind.GATEWAY)
    assert record is not None and not record.process.gone()
    os.kill(record.process.pid, signal.SIGKILL)
    other = await met(server)
    assert other.hello.kind is PeerKind.GATEWAY
    assert launch_of(other)[0] == 1 and launch_of(other) > launch_of(links[PeerKind.GATEWAY])
    children = psutil.Process(process.pid).children(recursive=True)
    for link in (other, links[PeerKind.RUNNER]):
        link.send(Shutdown("done"))
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    assert psutil.wait_procs(children, PATIENCE_S)[1] == []


async def test_what_is_told_to_end_leaves_nothing_and_may_be_followed(
    run: tuple[RunLayout, LinkServer],
) -> None:
    layout, server = run
    for epoch in (1, 2):
        process = await services(layout)
        links = [await met(server), await met(server)]
        assert {launch_of(link)[0] for link in links} == {epoch}
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        assert psutil.wait_procs(children, PATIENCE_S)[1] == []
        assert (layout.services / RELEASED).read_text() == f"{epoch}\n", "the next may start on any node"
