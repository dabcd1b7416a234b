"""`gyre cells host RUN`: room for cells of a live run in this allocation, or on this machine.

The host says hello to the run's controller, offers its cells and starts what it is asked to, as steps of its own job or as
child processes. It ends when the run does, when no controller has answered for `cluster.orphan_grace_s`, or when it is told
to: by TERM, USR2 (the time limit, preemption) or INT it has its cells leave in order within `GRACE_S`, a second signal ends
them at once. Nothing it started outlives it, nor its link: a controller that it finds afterwards gets new cells from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Final

from gyre_hpc.config import RunConfig
from gyre_hpc.errors import GyreError, PeerLost
from gyre_hpc.launch.elsewhere.remote import here
from gyre_hpc.launch.nodes.scratch import begin_to_remove_stale
from gyre_hpc.launch.plan import ProcessHandle, SiteLauncher
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.hosts import node_name
from gyre_hpc.transport.links import Link
from gyre_hpc.transport.messages import (
    EndProcess,
    Goodbye,
    Hello,
    LeaveCells,
    OfferCells,
    PeerKind,
    ProcessEnded,
    ProcessSerial,
    Shutdown,
    StartProcess,
)

log = logging.getLogger(__name__)
GRACE_S: Final = 45.0
"""Longest time for cells to leave in order once the host was told to end."""
END_S: Final = 20.0
"""Longest wait for cells that the controller has told to end."""
ASK_S: Final = 5.0
"""Longest wait for Slurm to say whether the node of a process that has ended is lost."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


@dataclass
class CellHost:
    """One host, over as many links as it needs. `offer` is what each controller is told."""

    config: RunConfig
    layout: RunLayout
    offer: OfferCells
    launcher: SiteLauncher
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody told this host to end."""
    _why: str = ""
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)
    _index: int = field(default_factory=lambda: secrets.randbits(31))
    _running: dict[ProcessSerial, ProcessHandle] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> str:
        """Serve until the run ends or somebody tells the host to; returns why. Raises PeerLost if no controller answers."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._told, signal.Signals(number).name)
        begin_to_remove_stale(self.config)
        incarnation, served = 0, False
        while not self.asked.is_set():
            incarnation += 1
            try:
                link = await self._unless_asked(self._connect(incarnation))
            except PeerLost as error:
                if not served:
                    raise
                return f"the run has no controller any more: {error.message}"
            if link is None:
                break
            served = True
            if reason := await self._serve(link):
                return reason
        return self._why

    def _told(self, name: str) -> None:
        if self.asked.is_set():
            self._hurry.set()
        self._ask(name)

    def _ask(self, why: str) -> None:
        log.info("told to end by %s", why)
        self._why = self._why or why
        self.asked.set()

    async def _connect(self, incarnation: int) -> Link:
        hello = Hello(PeerKind.CELL_HOST, self._index, os.getpid(), node_name(), "")
        return await Link.connect(
            self.layout,
            hello,
            incarnation,
            heartbeat_s=self.config.transport.heartbeat_s,
            timeout_s=self.config.cluster.orphan_grace_s,
        )

    async def _unless_asked(self, connecting: Coroutine[None, None, Link]) -> Link | None:
        """The link, None if the host is told to end while it waits for one."""
        tasks = asyncio.create_task(connecting), asyncio.create_task(self.asked.wait())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return None if tasks[0].cancelled() else tasks[0].result()

    # ---- one controller -----------------------------------------------------------------------------------------

    async def _serve(self, link: Link) -> str:
        """Do what this controller asks; why the host ends, "" when only the link has."""
        log.info("offering %d cells to the controller of epoch %d", self.offer.cells, link.epoch)
        link.send(self.offer)
        leaving = asyncio.create_task(self._leave(link))
        try:
            reason = await self._read(link, leaving)
        finally:
            leaving.cancel()
            await self._end_all()
            link.send(Goodbye())
            await link.close()
        return reason

    async def _read(self, link: Link, leaving: asyncio.Task[None]) -> str:
        while True:
            receiving = asyncio.create_task(link.receive())
            await asyncio.wait((receiving, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                receiving.cancel()
                return self._why
            match receiving.result():
                case None:
                    log.warning("the link to the controller is broken")
                    return self._why
                case StartProcess() as message:
                    await self._start(link, message)
                case EndProcess(serial=serial, grace_s=grace_s) if serial in self._running:
                    self._spawn(_end(self._running[serial], grace_s))
                case LeaveCells(reason=reason):
                    self._ask(reason)
                case Shutdown(reason=reason):
                    await self._all_ended(END_S)
                    return self._why or reason

    async def _leave(self, link: Link) -> None:
        """Once told to: have the cells leave; returns when their time is over, or nobody wants to wait."""
        await self.asked.wait()
        link.send(LeaveCells(GRACE_S, self._why))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), GRACE_S)

    # ---- processes ----------------------------------------------------------------------------------------------

    async def _start(self, link: Link, message: StartProcess) -> None:
        try:
            spec = here(message, self.layout)
            words = ["--guest", *["--rollout-only"] * self.offer.rollout_only]
            handle = await self.launcher.start(replace(spec, argv=[*spec.argv, *words]))
        except GyreError as error:
            log.error("%s: %s", message.name, error)
            link.send(ProcessEnded(message.serial, error.exit_code, error.message))
            return
        log.info("%s started", message.name)
        self._running[message.serial] = handle
        self._spawn(self._watch(link, message.serial, handle))

    async def _watch(self, link: Link, serial: ProcessSerial, handle: ProcessHandle) -> None:
        code = await handle.wait()
        log.info("%s ended with %d", handle.name, code)
        lost = await self._lost_nodes(handle)
        del self._running[serial]
        link.send(ProcessEnded(serial, code, nodes=handle.nodes, lost=lost))

    async def _lost_nodes(self, handle: ProcessHandle) -> tuple[str, ...]:
        """Where an ended process was taken by the loss of its node: srun says 0 to that as well."""
        if handle.unanswered or not handle.nodes:
            return handle.nodes if handle.unanswered else ()
        try:
            async with asyncio.timeout(ASK_S):
                usable = await self.launcher.usable()
        except TimeoutError:
            usable = None
        return () if usable is None else tuple(node for node in handle.nodes if node not in usable)

    async def _all_ended(self, timeout_s: float) -> None:
        waits = [asyncio.create_task(handle.wait()) for handle in self._running.values()]
        if waits:
            await asyncio.wait(waits, timeout=timeout_s)

    async def _end_all(self) -> None:
        """Nothing that a controller asked for goes on without it."""
        await asyncio.gather(*(handle.terminate(END_S / 4) for handle in list(self._running.values())))
        await asyncio.gather(*self._tasks)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _end(handle: ProcessHandle, grace_s: float) -> None:
    if grace_s > 0:
        await handle.terminate(grace_s)
    else:
        handle.kill()
