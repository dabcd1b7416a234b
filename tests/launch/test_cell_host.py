"""A cell host and the launcher behind it, over a real link, with real child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from gyre_hpc.config import ModelConfig, RunConfig
from gyre_hpc.errors import PeerLost
from gyre_hpc.launch.elsewhere.cell_host import CellHost
from gyre_hpc.launch.elsewhere.remote import GONE, RemoteLauncher, described, here
from gyre_hpc.launch.local import LocalLauncher, LocalProcess, spawn
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.links import LinkServer, PeerLink, write_rendezvous, write_secret
from gyre_hpc.transport.messages import LeaveCells, OfferCells, ProcessEnded, ProcessSerial, Shutdown

PATIENCE_S = 60.0
OFFER = OfferCells(2, False, "17")


class Bench:
    """A controller's ends, and one host."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        config = RunConfig(model=ModelConfig(path="unused"))
        config.cluster.orphan_grace_s = 1.0
        self.host = CellHost(config, layout, OFFER, LocalLauncher())
        self.running: asyncio.Task[str] | None = None
        self.server = LinkServer(write_secret(layout), 1, "127.0.0.1")

    async def controller(self) -> tuple[PeerLink, RemoteLauncher]:
        """The next link of the host, once it has offered its cells."""
        if self.running is None:
            write_rendezvous(self.layout, *await self.server.start(), 1)
            self.running = asyncio.create_task(self.host.run())
        async with asyncio.timeout(PATIENCE_S):
            link = await self.server.accept()
            assert await link.receive() == OFFER
        return link, RemoteLauncher(link.send, self.layout)

    def spec(self, script: str) -> ProcessSpec:
        log = self.layout.logs(1) / "cell-5.log"
        return ProcessSpec("cell-5", ["/bin/sh", "-c", script], {"WORD": "said"}, log)

    async def heard(self, text: str) -> str:
        """The first line of the process's log, once it has `text`."""
        log = self.layout.logs(1) / "cell-5.log"
        async with asyncio.timeout(PATIENCE_S):
            while not (log.exists() and text in log.read_text()):
                await asyncio.sleep(0.01)
        return log.read_text().splitlines()[0]

    async def ended(self, link: PeerLink, launcher: RemoteLauncher) -> ProcessEnded:
        async with asyncio.timeout(PATIENCE_S):
            message = await link.receive()
        assert isinstance(message, ProcessEnded)
        launcher.ended(message)
        return message

    async def why(self) -> str:
        assert self.running is not None
        return await asyncio.wait_for(self.running, PATIENCE_S)


class LosingNodes(LocalLauncher):
    """Its processes run on n1 and n2; Slurm has lost n2."""

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        return OnNodes(spec.name, spawn(spec))

    async def usable(self) -> frozenset[str] | None:
        return frozenset({"n1"})


class OnNodes(LocalProcess):
    @property
    def nodes(self) -> tuple[str, ...]:
        return ("n1", "n2")


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(RunLayout(tmp_path))
    yield bench
    if bench.running is not None and not bench.running.done():
        bench.running.cancel()
        await asyncio.wait([bench.running])
    await bench.server.close()


def test_a_process_is_described_in_words_that_hold_on_any_host(tmp_path: Path) -> None:
    there, mine = RunLayout(tmp_path / "there"), RunLayout(tmp_path / "mine")
    argv = [sys.executable, "-m", "gyre_hpc.cells.leader", "--run", str(there.root), "--cell", "5"]
    spec = ProcessSpec("cell-5", argv, log=there.logs(2) / "cell-5.log", mem="2G", avoid=frozenset({"n1"}))
    found = here(described(spec, ProcessSerial(1), there), mine)
    assert (
        list(found.argv) == [*argv[:4], str(mine.root), *argv[5:]]
        and found.log == mine.logs(2) / "cell-5.log"
    )
    assert (found.mem, found.avoid) == ("2G", frozenset({"n1"}))


async def test_a_process_runs_on_the_host_and_its_end_is_told(bench: Bench) -> None:
    link, launcher = await bench.controller()
    process = await launcher.start(bench.spec("echo $WORD; exit 7"))
    assert process.poll() is None
    assert (await bench.ended(link, launcher)).code == 7
    assert await process.wait() == process.poll() == 7
    assert await bench.heard("said") == "said"


async def test_a_process_is_asked_to_end_or_killed(bench: Bench) -> None:
    link, launcher = await bench.controller()
    process = await launcher.start(bench.spec("trap 'exit 3' TERM; echo ready; sleep 600 & wait"))
    await bench.heard("ready")
    ending = asyncio.create_task(process.terminate(PATIENCE_S))
    await bench.ended(link, launcher)
    await ending
    assert process.poll() == 3
    process = await launcher.start(bench.spec("sleep 600"))
    process.kill()
    await bench.ended(link, launcher)
    assert await process.wait() == -signal.SIGKILL


async def test_a_program_that_is_missing_ends_at_once(bench: Bench) -> None:
    link, launcher = await bench.controller()
    spec = ProcessSpec("cell-5", ["/nowhere/python"], log=bench.layout.logs(1) / "cell-5.log")
    process = await launcher.start(spec)
    ended = await bench.ended(link, launcher)
    assert "/nowhere/python" in ended.error and await process.wait() == 2


async def test_what_runs_ends_with_the_link_and_the_host_looks_for_a_controller(bench: Bench) -> None:
    link, launcher = await bench.controller()
    process = await launcher.start(bench.spec("echo $$; sleep 600"))
    pid = int(await bench.heard("\n"))
    link.abandon()
    launcher.lost()
    assert await process.wait() == GONE
    again, _ = await bench.controller()
    assert again.incarnation == link.incarnation + 1 and not psutil.pid_exists(pid)
    again.send(Shutdown("done"))
    assert await bench.why() == "done"


async def test_a_host_without_a_controller_gives_up_after_the_grace(bench: Bench) -> None:
    link, _ = await bench.controller()
    bench.layout.rendezvous.unlink()
    link.abandon()
    assert "no controller" in await bench.why()
    with pytest.raises(PeerLost):
        await CellHost(bench.host.config, bench.layout, OFFER, LocalLauncher()).run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
async def test_a_signal_asks_the_controller_first_and_a_second_one_nobody(
    bench: Bench, number: signal.Signals
) -> None:
    link, launcher = await bench.controller()
    await launcher.start(bench.spec("trap '' TERM; echo ready; while :; do sleep 600; done"))
    await bench.heard("ready")
    os.kill(os.getpid(), number)
    async with asyncio.timeout(PATIENCE_S):
        message = await link.receive()
    assert isinstance(message, LeaveCells) and message.reason == number.name
    assert bench.running is not None and not bench.running.done()
    os.kill(os.getpid(), number)
    assert await bench.why() == number.name
    assert (await bench.ended(link, launcher)).code == -signal.SIGKILL


async def test_cells_that_were_told_to_end_count_as_a_signal_to_the_host(bench: Bench) -> None:
    link, _ = await bench.controller()
    link.send(LeaveCells(30.0, "SIGTERM to its cells"))
    link.send(Shutdown("none of its cells is left"))
    assert await bench.why() == "SIGTERM to its cells" and bench.host.asked.is_set()


async def test_a_process_that_went_with_its_node_is_told_so_whatever_its_exit_code(bench: Bench) -> None:
    bench.host.launcher = LosingNodes()
    link, launcher = await bench.controller()
    process = await launcher.start(bench.spec("exit 0"))
    message = await bench.ended(link, launcher)
    assert (message.code, message.nodes, message.lost) == (0, ("n1", "n2"), ("n2",))
    assert process.lost == ("n2",) and process.nodes == ("n1", "n2")
