"""The gateway worker: HTTP on an inherited socket, obeying the controller over a link.

It outlives its controller: while the link is down calls are served, answers to the controller wait, and the worker looks
for a controller for `cluster.orphan_grace_s`, as a new incarnation; then it ends. To a controller of another epoch it says
first which attempts it holds; orders of the earlier one are not answered, its routes are void. After a restart its call log
brings open executions back, and the controller sends keys and routes again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

import aiohttp

from gyre_hpc.config import RunConfig
from gyre_hpc.engines.client import EngineClient
from gyre_hpc.errors import PeerLost
from gyre_hpc.gateway.app import GatewayApp
from gyre_hpc.gateway.call_log import CallLog, call_log_path
from gyre_hpc.gateway.pages import Moved, PageMover
from gyre_hpc.gateway.parts import DeliverMode
from gyre_hpc.gateway.rendering import Rendering
from gyre_hpc.gateway.restore import read_for_restore, restore
from gyre_hpc.gateway.routing import Router
from gyre_hpc.gateway.server import EDGE, gateway_runner
from gyre_hpc.kv.client import PortClient
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import CellId, ExecutionId, KvPolicy
from gyre_hpc.transport.hosts import node_name
from gyre_hpc.transport.links import Link
from gyre_hpc.transport.messages import (
    CloseExecution,
    EngineFault,
    ExecutionSealed,
    GatewayStatus,
    Goodbye,
    HeldBack,
    Hello,
    Holding,
    Message,
    OpenExecution,
    PeerKind,
    Route,
    Serial,
    Shutdown,
    StepDone,
    StepName,
    Unroute,
    Unrouted,
)
from gyre_hpc.transport.notice import heed_signals
from gyre_hpc.transport.rendezvous import engine_token, read_secret
from gyre_hpc.transport.succession import first_wait, orphan_grace, until_succession

log = logging.getLogger(__name__)

STATUS_S = 1.0
"""Seconds between two GatewayStatus."""
HELD_STEP_S = 1.0
"""An attempt's held seconds are told when they have grown by so much."""
SEALED_KEPT_S = 600.0
"""A controller asks again, right after a new link, for accounts that went down with the link before: a message waits for
SEND_TIMEOUT_S and SILENT_HOST_S of `transport.peer` at most. To another controller all that is kept counts as sealed just then."""
SHUTDOWN_S = 1.0
"""Seconds that open connections get at the end; their calls are already over."""


class Worker:
    """One worker process."""

    def __init__(
        self, layout: RunLayout, config: RunConfig, listening: socket.socket, launch: int, incarnation: int
    ) -> None:
        self._layout = layout
        self._config = config
        self._socket = listening
        self._launch = launch
        self._incarnation = incarnation
        self._token = engine_token(read_secret(layout))
        self._engines: dict[str, EngineClient] = {}
        self._outbox: list[Message] = []
        self._link: Link | None = None
        self._epoch = -1
        """Of the last controller."""
        self._ending = asyncio.Event()
        self.orphaned = False
        """It has ended because no controller came back."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[tuple[int, int], float] = {}
        self._routes: dict[CellId, Serial] = {}
        self._unroutes: dict[CellId, Serial] = {}

    async def run(self) -> None:
        """Serve until Shutdown, a signal, or the orphan grace is over."""
        config = self._config
        path = call_log_path(self._layout, self._launch)
        logged = read_for_restore(path)
        call_log = CallLog(path, self._incarnation, end=logged.offset)
        rendering = Rendering(self._layout.model, config.model.renderer, config.model.thinking)
        policy = KvPolicy(config.engine.kv_policy)
        router = Router(self._engine, self._engine_fault, keeps_calls=policy.keeps_calls)
        pages = PageMover(
            self._port,
            router,
            policy,
            config.gateway.kv_move_s,
            config.engine.page_tokens,
            self._pages_moved,
        )
        self._app = GatewayApp(
            rendering,
            router,
            call_log,
            config.gateway,
            config.model.max_context,
            config.harness.roles,
            pages,
            DeliverMode(config.harness.deliver),
            config.harness.session,
        )
        log.info("%d open executions restored from %s", restore(self._app, logged), path)
        heed_signals(config.cluster, lambda: self._link, self._ending.set)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self._session:
            runner = gateway_runner(self._app, SHUTDOWN_S)
            await runner.setup()
            server = await runner.app[EDGE].serve(runner, self._socket)
            try:
                await self._live(call_log)
            finally:
                server.close()
                await self._app.close()
                await runner.cleanup()
                call_log.close()
        if self._link is not None:
            self._link.send(Goodbye())
            await self._link.close()

    async def _live(self, call_log: CallLog) -> None:
        """Until the first of: the end is asked for, or one of the standing duties fails."""
        duties = [
            asyncio.create_task(self._ending.wait(), name="end"),
            asyncio.create_task(self._obey(), name="controller"),
            asyncio.create_task(call_log.keep_synced(self._config.gateway.fsync_s), name="fsync"),
            asyncio.create_task(self._report(), name="status"),
        ]
        done, pending = await asyncio.wait(duties, return_when=asyncio.FIRST_COMPLETED)
        for task in [*pending, *self._tasks]:
            task.cancel()
        await asyncio.wait([*duties, *self._tasks])
        for task in done:
            task.result()

    async def _obey(self) -> None:
        """Follow one controller after another."""
        wait_s, grace_s = first_wait(self._config.cluster), orphan_grace(self._config.cluster)
        while True:
            try:
                link = await Link.connect(
                    self._layout,
                    self._hello(),
                    self._incarnation,
                    heartbeat_s=self._config.transport.heartbeat_s,
                    timeout_s=wait_s,
                )
            except PeerLost as error:
                log.error("no controller: the gateway ends. %s", error)
                self.orphaned = True
                return
            self._greet(link)
            async with until_succession(link, self._layout):
                while (received := await link.receive()) is not None:
                    if isinstance(received, Shutdown):
                        log.info("shutdown: %s", received.reason)
                        return
                    self._handle(received)
            log.warning("the link to the controller is down; calls are served for %g s more", grace_s)
            self._link, wait_s = None, grace_s
            self._incarnation += 1

    def _greet(self, link: Link) -> None:
        """Say what is held, if this is another controller than before; then what waited for the same one."""
        waiting, self._outbox = self._outbox, []
        if link.epoch != self._epoch:
            waiting = [Holding(self._app.held())]
            self._epoch = link.epoch
            self._routes.clear()
            self._unroutes.clear()
            self._held.clear()
            self._app.router.forget_routes()
            self._app.keep_sealed()
        self._link = link
        for message in waiting:
            link.send(message)

    def _hello(self) -> Hello:
        host, port = self._socket.getsockname()[:2]
        reachable = socket.gethostname() if host in ("0.0.0.0", "::") else host
        address = f"http://{reachable}:{port}"
        return Hello(PeerKind.GATEWAY, 0, os.getpid(), node_name(), address)

    def _handle(self, message: Message) -> None:
        match message:
            case OpenExecution():
                self._app.open_execution(message.execution, message.attempt, message.key)
            case Route():
                self._routes[message.cell] = message.serial
                at = (message.cell, message.address, message.capacity, message.version)
                self._app.router.route(*at, message.port, message.place, message.weights)
            case CloseExecution():
                self._spawn(self._close(message))
            case Unroute():
                self._spawn(self._unroute(message, self._emptied(message)))
            case _:
                log.warning("%s is not for a gateway: ignored", type(message).__name__)

    async def _close(self, message: CloseExecution) -> None:
        account, incomplete = await self._app.close_execution(message.execution, message.attempt)
        self._send(
            ExecutionSealed(
                execution=message.execution, attempt=message.attempt, incomplete=incomplete, **asdict(account)
            )
        )

    def _emptied(self, message: Unroute) -> Coroutine[Any, Any, int]:
        self._unroutes[message.cell] = message.serial

        def told(step: StepName, began: float, calls: int) -> None:
            self._send(
                StepDone(message.cell, message.serial, step, start=began, end=time.time(), calls=calls)
            )

        executions = list(self._app.executions.values())
        return self._app.pages.empty(
            message.cell, executions, message.drain_s, gone=message.gone, moves=message.moves, told=told
        )

    async def _unroute(self, message: Unroute, emptied: Coroutine[Any, Any, int]) -> None:
        log.info("cell %d leaves: %s", message.cell, message.cause)
        epoch, cut = self._epoch, await emptied
        if epoch == self._epoch:
            self._send(Unrouted(message.cell, cut, message.serial))

    def _pages_moved(self, cell: CellId, step: StepName, moved: Moved) -> None:
        """A step of the newest Unroute of the cell has moved pages."""
        if cell in self._unroutes:
            self._send(
                StepDone(
                    cell,
                    self._unroutes[cell],
                    step,
                    start=moved.began,
                    end=time.time(),
                    bytes=moved.bytes,
                    pages=moved.pages,
                    calls=moved.calls,
                    outcome=moved.outcome,
                )
            )

    def _engine_fault(self, cell: CellId, cause: str) -> None:
        if cell in self._routes:
            self._send(EngineFault(cell, cause, self._routes[cell]))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            if self._link is not None:
                router = self._app.router
                self._link.send(GatewayStatus(router.running(), router.waiting, self._app.tokens))
                self._report_holding(self._link)
                self._app.forget_sealed(SEALED_KEPT_S + self._config.cluster.orphan_grace_s)

    def _report_holding(self, link: Link) -> None:
        """Tell of every attempt whose calls we have held for a second longer than was told."""
        told, self._held = self._held, {}
        for key, execution in self._app.executions.items():
            self._held[key] = told.get(key, 0.0)
            if execution.held_s >= self._held[key] + HELD_STEP_S:
                self._held[key] = execution.held_s
                link.send(HeldBack(ExecutionId(execution.id), execution.attempt, execution.held_s))

    def _send(self, message: Message) -> None:
        """To the controller, or kept for the next one."""
        if self._link is None:
            self._outbox.append(message)
        else:
            self._link.send(message)

    def _engine(self, address: str) -> EngineClient:
        if address not in self._engines:
            self._engines[address] = EngineClient(address, self._session, self._token)
        return self._engines[address]

    def _port(self, address: str) -> PortClient:
        return PortClient(address, self._session, self._token)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an order of the controller failed: the worker ends", exc_info=error)
            self._ending.set()
