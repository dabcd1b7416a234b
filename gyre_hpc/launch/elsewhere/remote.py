"""Processes in another allocation, or on another machine, started through a cell host that has offered room there.

The controller's end is a launcher like any other: what it starts is described to the host, which runs it as its own
(`cell_host.py`) and tells of its end. A host that is gone has ended everything it started: it kills its processes when its
link breaks, and they do not outlive it. The host fills in its own Python and its own path of the run folder.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.messages import EndProcess, Message, ProcessEnded, ProcessSerial, StartProcess

log = logging.getLogger(__name__)
PYTHON: Final = "{python}"
RUN: Final = "{run}"
GONE: Final = -9
"""Exit code of what ran on a host that is gone: as if killed."""
ANSWER_S: Final = 10.0
"""Longest wait, beyond a process's grace, for its host to say that it has ended."""


def described(spec: ProcessSpec, serial: ProcessSerial, layout: RunLayout) -> StartProcess:
    """`spec` in words that hold on any host. Its log lies in the run folder."""
    fill = {sys.executable: PYTHON, str(layout.root): RUN}
    return StartProcess(
        serial=serial,
        name=spec.name,
        argv=tuple(fill.get(word, word) for word in spec.argv),
        env=dict(spec.env),
        log=layout.named(spec.log),
        nodes=spec.nodes,
        ranks=spec.ranks,
        cpus_per_rank=spec.cpus_per_rank,
        mem=spec.mem,
        gres=spec.gres,
        avoid=spec.avoid,
        never=spec.never,
    )


def here(message: StartProcess, layout: RunLayout) -> ProcessSpec:
    """What a host starts. `layout`: the run folder as this host sees it."""
    fill = {PYTHON: sys.executable, RUN: str(layout.root)}
    return ProcessSpec(
        name=message.name,
        argv=[fill.get(word, word) for word in message.argv],
        env=message.env,
        log=layout.root / Path(message.log),
        nodes=message.nodes,
        ranks=message.ranks,
        cpus_per_rank=message.cpus_per_rank,
        mem=message.mem,
        gres=message.gres,
        avoid=message.avoid,
        never=message.never,
    )


class RemoteProcess:
    """A process of a host. `pid` is 0: it means nothing on this host."""

    pid = 0
    unanswered = False

    def __init__(self, name: str, serial: ProcessSerial, send: Callable[[Message], None]) -> None:
        self.name, self._serial, self._send = name, serial, send
        self.nodes: tuple[str, ...] = ()
        """Where it ran; known at its end."""
        self.lost: tuple[str, ...] = ()
        """Of its nodes, those whose loss took it."""
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def poll(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def terminate(self, grace_s: float) -> None:
        self._end(grace_s)
        try:
            async with asyncio.timeout(grace_s + ANSWER_S):
                await self.wait()
        except TimeoutError:
            log.error("%s: its host does not say that it has ended", self.name)
            self.ended(GONE)

    def kill(self) -> None:
        self._end(0.0)

    def _end(self, grace_s: float) -> None:
        if not self._ended.done():
            self._send(EndProcess(self._serial, grace_s))

    def ended(self, code: int) -> None:
        """Its host says so, or is gone. The first word counts."""
        if not self._ended.done():
            self._ended.set_result(code)


@dataclass
class RemoteLauncher:
    """Starts processes through the host behind `send`."""

    send: Callable[[Message], None]
    layout: RunLayout
    gone: bool = False
    _running: dict[ProcessSerial, RemoteProcess] = field(default_factory=dict)
    _serials: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def start(self, spec: ProcessSpec) -> RemoteProcess:
        """Have the host start it; what the host cannot start ends at once."""
        serial = ProcessSerial(next(self._serials))
        process = RemoteProcess(spec.name, serial, self.send)
        if self.gone:
            process.ended(GONE)
            return process
        self._running[serial] = process
        self.send(described(spec, serial, self.layout))
        return process

    def ended(self, message: ProcessEnded) -> None:
        """The host's word on a process; nothing for one it has told of."""
        process = self._running.pop(message.serial, None)
        if process is None:
            return
        if message.error:
            log.error("%s could not be started: %s", process.name, message.error)
        process.nodes, process.lost = message.nodes, message.lost
        process.ended(message.code)

    def lost(self) -> None:
        """The host is gone, and everything it ran."""
        self.gone = True
        for process in self._running.values():
            process.ended(GONE)
        self._running.clear()
