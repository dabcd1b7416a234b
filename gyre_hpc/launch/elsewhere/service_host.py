"""`gyre services RUN`: gateway and runner of a run in a Slurm job of their own, over any number of its controllers.

The batch process of that job: it starts both, starts one that died again under the next launch number, and ends when they do:
the controller tells them once the run is done. One such process owns `RUN/services` at a time (`owner` files, as for the run
folder). TERM and INT end both; nothing it started outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import PeerLost
from gyre_hpc.launch.incarnations import OUTLIVE, command, launch_number
from gyre_hpc.launch.owner import acquire, release
from gyre_hpc.launch.plan import Launcher, ProcessHandle, ProcessSpec
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.messages import PeerKind

log = logging.getLogger(__name__)
END_S = 20.0
"""Seconds both get to end once they were told to."""


@dataclass
class ServiceHost:
    """Both processes under one number of the owner of `RUN/services`."""

    layout: RunLayout
    cluster: ClusterConfig
    launcher: Launcher
    epoch: int
    _launches: int = 0
    _restarts: int = 0
    _running: dict[PeerKind, ProcessHandle] = field(default_factory=dict)
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until one has ended on purpose, or somebody says so. Raises PeerLost when `cluster.restarts` are used up."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told.set)
        try:
            for kind in OUTLIVE:
                await self._start(kind)
            while not self._told.is_set() and (died := await self._ended()) is not None:
                await self._restart(died)
        finally:
            await asyncio.gather(*(process.terminate(END_S) for process in self._running.values()))

    async def _ended(self) -> PeerKind | None:
        """The next that died; None when one ended on purpose, or somebody said to end."""
        waits = {asyncio.create_task(process.wait()): kind for kind, process in self._running.items()}
        told = asyncio.create_task(self._told.wait())
        done, pending = await asyncio.wait([*waits, told], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        died = [(waits[task], task.result()) for task in done if task in waits]
        if told in done or any(code == 0 for _, code in died):
            return None
        kind, code = died[0]
        log.error("the %s ended with code %d", kind, code)
        return kind

    async def _restart(self, kind: PeerKind) -> None:
        self._restarts += 1
        if self._restarts > self.cluster.restarts:
            raise PeerLost(
                f"the {kind} died, and cluster.restarts={self.cluster.restarts} are used up",
                fix=f"see {self._log(kind)}; then gyre submit resume={self.layout.root}",
            )
        await self._start(kind)

    async def _start(self, kind: PeerKind) -> None:
        self._launches += 1
        argv = command(kind, self.layout.root, launch_number(self.epoch, self._launches))
        self._running[kind] = await self.launcher.start(
            ProcessSpec(name=f"{kind}-0", argv=argv, log=self._log(kind))
        )

    def _log(self, kind: PeerKind) -> Path:
        return self.layout.root / "logs" / f"services-{self.epoch}" / f"{kind}-0.log"


def serve(layout: RunLayout, cluster: ClusterConfig, launcher: Launcher) -> None:
    """The life of the process. Raises RunOwned while another one serves the run, PeerLost."""
    layout.services.mkdir(exist_ok=True)
    owner = acquire(layout.services)
    try:
        asyncio.run(ServiceHost(layout, cluster, launcher, owner.epoch).run())
    finally:
        release(layout.services, owner)
