"""A real gateway process over real engine processes, obeying a stand-in for the controller in the test's process.

Every engine stands behind a `FaultProxy`. The stand-in does what a controller does towards a gateway: opens executions,
routes cells, routes a cell again that was reported failed, and follows the gateway from worker to worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.config import EngineConfig, RunConfig, save_run_config
from gyre_hpc.engines.process import EngineProcess
from gyre_hpc.gateway.call_log import CallLogReader, call_logs
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CallRecord, CellId, ExecutionId, Version
from gyre_hpc.transport.links import LinkServer, PeerLink, read_secret, write_rendezvous, write_secret
from gyre_hpc.transport.messages import (
    CloseExecution,
    EngineFault,
    ExecutionSealed,
    OpenExecution,
    Route,
    Serial,
    Shutdown,
    Unroute,
)

from .proxy import FaultProxy

MAX_CONTEXT = 1200
TOKENS_PER_S = 400.0
"""Pace of an engine with all calls running: an answer takes about a second."""
CAPACITY = 8
SILENCE_S = 15.0
"""An engine that hangs is found out so late: a busy machine is silent for seconds, too."""


class StandIn:
    """The controller of one epoch, as the gateway sees it."""

    def __init__(self, layout: RunLayout, epoch: int) -> None:
        self._layout = layout
        self._server = LinkServer(read_secret(layout), epoch, "127.0.0.1")
        self._epoch = epoch
        self.keys: dict[int, str] = {}
        self.routes: dict[int, tuple[str, int]] = {}
        self.faults: list[tuple[int, str]] = []
        self.sealed: dict[int, ExecutionSealed] = {}
        self.link: PeerLink | None = None
        self.news = asyncio.Event()
        self._serial = 0

    async def start(self) -> None:
        write_rendezvous(self._layout, *await self._server.start(), self._epoch)
        self._task = asyncio.create_task(self._follow())

    async def linked(self) -> PeerLink:
        while self.link is None:
            await self.news.wait()
        return self.link

    def open(self, execution: int, key: str) -> None:
        self.keys[execution] = key
        if self.link is not None:
            self.link.send(OpenExecution(ExecutionId(execution), 1, key, False))

    def route(self, cell: int, url: str, version: int) -> None:
        self.routes[cell] = (url, version)
        if self.link is not None:
            self._serial += 1
            self.link.send(Route(CellId(cell), url, CAPACITY, Version(version), Serial(self._serial)))

    def unroute(self, cell: int) -> None:
        self.routes.pop(cell, None)
        if self.link is not None:
            self._serial += 1
            self.link.send(Unroute(CellId(cell), 0.0, "the test", Serial(self._serial)))

    async def close_execution(self, execution: int) -> ExecutionSealed:
        (await self.linked()).send(CloseExecution(ExecutionId(execution), 1))
        while execution not in self.sealed:
            await self.news.wait()
        return self.sealed[execution]

    def die(self) -> None:
        """As a killed process: every socket closes at once, nothing is said."""
        self._task.cancel()
        if self.link is not None:
            self.link.abandon()
        assert self._server._server is not None
        self._server._server.close()

    async def shut_down(self) -> None:
        if self.link is not None:
            self.link.send(Shutdown("end of test"))

    async def _follow(self) -> None:
        while True:
            link = await self._server.accept()
            for execution, key in self.keys.items():
                link.send(OpenExecution(ExecutionId(execution), 1, key, False))
            self.link = link
            for cell, (url, version) in self.routes.items():
                self.route(cell, url, version)
            self._notify()
            while (message := await link.receive()) is not None:
                if isinstance(message, EngineFault):
                    self.faults.append((message.cell, message.cause))
                    asyncio.get_running_loop().call_later(0.5, self._again, message.cell)
                elif isinstance(message, ExecutionSealed):
                    self.sealed[message.execution] = message
                self._notify()
            self.link = None

    def _again(self, cell: int) -> None:
        """A cell that failed and is still there is routed again."""
        if cell in self.routes:
            self.route(cell, *self.routes[cell])

    def _notify(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


@dataclass
class Cell:
    """An engine process behind its proxy."""

    number: int
    engine: EngineProcess
    proxy: FaultProxy

    def send(self, number: signal.Signals) -> None:
        assert self.engine.pid is not None
        os.kill(self.engine.pid, number)


@dataclass
class Rig:
    """Everything of one gateway."""

    layout: RunLayout
    rendering: Rendering
    controller: StandIn
    gateway: asyncio.subprocess.Process
    cells: list[Cell] = field(default_factory=list)
    epoch: int = 1
    executions: int = 0

    async def cell(self) -> Cell:
        """A fresh engine of its own weight version, not routed."""
        number = len(self.cells)
        config = EngineConfig(page_tokens=16, pool_tokens=16384, capacity=CAPACITY, tokens_per_s=TOKENS_PER_S)
        log = self.layout.root / f"engine-{number}.log"
        engine = EngineProcess(config, self.layout.model, Version(number), log, MAX_CONTEXT, seed=number)
        cell = Cell(number, engine, FaultProxy("", self.rendering))
        self.cells.append(cell)
        cell.proxy = FaultProxy(await engine.start(), self.rendering)
        await cell.proxy.serve()
        return cell

    def route(self, cell: Cell) -> None:
        self.controller.route(cell.number, cell.proxy.url, cell.number)

    def unroute(self, cell: Cell) -> None:
        self.controller.unroute(cell.number)

    async def execution(self) -> tuple[int, str]:
        """Number and base URL of a fresh execution."""
        link = await self.controller.linked()
        self.executions += 1
        key = f"key-{self.executions}"
        self.controller.open(self.executions, key)
        return self.executions, f"{link.hello.address}/x/{key}"

    async def kill_worker(self) -> None:
        """SIGKILL for the process that serves; its parent, which holds the listening socket, starts the next."""
        link = await self.controller.linked()
        self.controller.link = None
        os.kill(link.hello.pid, signal.SIGKILL)

    async def kill_controller(self) -> None:
        """The controller dies, and with it every cell; a resumed one takes its place and knows the executions."""
        before = self.controller
        before.die()
        for cell in self.cells:
            if cell.engine.poll() is None and cell.number in before.routes:
                cell.send(signal.SIGKILL)
                await cell.engine.wait()
        self.epoch += 1
        self.controller = StandIn(self.layout, self.epoch)
        self.controller.keys = before.keys
        await self.controller.start()

    def records(self, execution: int) -> list[CallRecord]:
        """The calls of a sealed execution, as the trajectory plane reads them."""
        return recorded(self.layout, execution)


def recorded(layout: RunLayout, execution: int) -> list[CallRecord]:
    """The calls of a sealed execution of the one gateway that a run had."""
    (path,) = call_logs(layout)
    found = [item for item in CallLogReader(path).poll() if isinstance(item, CallRecord)]
    return [record for record in found if record.execution == execution]


@contextlib.asynccontextmanager
async def rigged(root: Path, model: Path, deliver: str = "answer", **settings: object) -> AsyncIterator[Rig]:
    """A gateway process without cells."""
    layout = RunLayout(root)
    layout.create()
    shutil.copytree(model, layout.model)
    config = RunConfig()
    config.model.path = "x"
    config.model.thinking = True
    config.harness.deliver = deliver
    config.model.max_context = MAX_CONTEXT
    config.gateway.keepalive_s = 0.3
    config.gateway.engine_silence_s = SILENCE_S
    for name, value in settings.items():
        assert hasattr(config.gateway, name)
        setattr(config.gateway, name, value)
    save_run_config(config, root)
    write_secret(layout)
    controller = StandIn(layout, 1)
    await controller.start()
    command = [sys.executable, "-m", "gyre_hpc.gateway.process", "--run", str(root), "--incarnation", "1000"]
    with (root / "gateway.log").open("ab") as log:
        gateway = await asyncio.create_subprocess_exec(*command, stderr=log)
    rig = Rig(layout, Rendering(layout.model, "qwen3", thinking=True), controller, gateway)
    try:
        yield rig
        await rig.controller.shut_down()
        assert await asyncio.wait_for(gateway.wait(), 60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            gateway.terminate()
        for cell in rig.cells:
            if cell.engine.poll() is None and cell.engine.pid is not None:
                cell.send(signal.SIGCONT)
            await cell.engine.stop()
            if cell.proxy.changed and hasattr(cell.proxy, "_runner"):
                await cell.proxy.close()
        rig.controller.die()
