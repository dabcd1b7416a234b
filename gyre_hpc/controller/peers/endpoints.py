"""MPI endpoint processes (transport=mpi): one beside the controller, one beside each cell leader, started again as they die.

Each is a one-rank step that may end at any time, killed by its host where it is stuck in MPI. It is started again later
and later; one that never gets as far as MPI is given up, as is one whose host is told that MPI cannot work there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.config import RunConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.plan import CONTROLLER, Launcher, ProcessHandle, ProcessSpec
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)
BACKOFF_S = (1.0, 60.0)
"""Wait before an endpoint is started again, doubled each time up to the second."""
STARTED_S = 300.0
"""An endpoint that ran so long starts again after the first wait."""
NEVER_READY = 3
"""An endpoint that ended so often before MPI ran is not started again."""
LEAVE_S = 2.0


@dataclass
class Endpoint:
    """The endpoint process beside one host. `ready`: whether MPI ran in it."""

    host: str
    spec: ProcessSpec
    handle: ProcessHandle | None = None
    started: float = 0.0
    wait_s: float = BACKOFF_S[0]
    ready: bool = False
    never_ready: int = 0
    wanted: bool = True


class Endpoints:
    """All endpoints of one controller, by the name of their host.

    `ended(host, reason)`: its channels are over. `off(host, reason)`: it never gets as far as MPI.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        epoch: int,
        launcher: Launcher,
        ended: Callable[[str, str], None],
        off: Callable[[str, str], None],
    ) -> None:
        self._config, self._layout, self._epoch = config, layout, epoch
        self._launcher, self._tell_ended, self._tell_off = launcher, ended, off
        self._endpoints: dict[str, Endpoint] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, name: str, beside: str, path: Path) -> None:
        """Keep an endpoint beside this host, which listens at `path`, unless MPI is off."""
        bridge = self._endpoints.get(CONTROLLER)
        if bridge is not None and not bridge.wanted:
            return
        endpoint = self._endpoints[name] = Endpoint(name, self._spec(name, beside, path))
        task = asyncio.create_task(self._keep_running(endpoint))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_ready(self, name: str) -> None:
        """MPI runs in it."""
        endpoint = self._endpoints.get(name)
        if endpoint is not None:
            endpoint.ready = True

    def end(self, name: str) -> None:
        """Its host has ended: so does it."""
        endpoint = self._endpoints.pop(name, None)
        if endpoint is not None:
            endpoint.wanted = False
            if endpoint.handle is not None:
                endpoint.handle.kill()

    def give_up(self, name: str) -> None:
        """Start it no more; without the bridge, none."""
        for endpoint in self._endpoints.values():
            if name in (CONTROLLER, endpoint.host):
                endpoint.wanted = False

    async def close(self) -> None:
        """Wait until all have left, killing those that do not."""
        handles = [e.handle for e in self._endpoints.values() if e.handle is not None]
        if handles:
            waits = [asyncio.ensure_future(handle.wait()) for handle in handles]
            await asyncio.wait(waits, timeout=LEAVE_S)
            for handle in handles:
                handle.kill()
            await asyncio.wait(waits, timeout=LEAVE_S)
        for task in self._tasks:
            task.cancel()

    def _spec(self, name: str, beside: str, path: Path) -> ProcessSpec:
        transport, cluster = self._config.transport, self._config.cluster
        argv = [sys.executable, "-m", "gyre_hpc.transport.mpi.endpoint", "--run", str(self._layout.root)]
        argv += ["--name", name, "--socket", str(path), "--plugin", cluster.mpi_plugin]
        argv += ["--join-s", str(transport.join_s), "--stall-s", str(transport.stall_s)]
        return ProcessSpec(
            name=f"mpi-{name}",
            argv=argv,
            env=cluster.mpi_env,
            log=self._layout.logs(self._epoch) / f"mpi-{name}.log",
            service=True,
            beside=beside,
            mpi=cluster.mpi_plugin,
        )

    async def _keep_running(self, endpoint: Endpoint) -> None:
        while endpoint.wanted:
            endpoint.started, endpoint.ready = time.monotonic(), False
            try:
                endpoint.handle = await self._launcher.start(endpoint.spec)
                code = await endpoint.handle.wait()
            except GyreError as error:
                log.warning("%s: %s", endpoint.spec.name, error)
                code = error.exit_code
            self._ended(endpoint, code)
            await asyncio.sleep(endpoint.wait_s)
            endpoint.wait_s = min(2 * endpoint.wait_s, BACKOFF_S[1])

    def _ended(self, endpoint: Endpoint, code: int) -> None:
        """Its channels are over; one that never got as far as MPI is not started for ever."""
        if not endpoint.wanted:
            return
        self._tell_ended(endpoint.host, f"the MPI endpoint of {endpoint.host} exited with {code}")
        if time.monotonic() - endpoint.started > STARTED_S:
            endpoint.wait_s = BACKOFF_S[0]
        endpoint.never_ready = 0 if endpoint.ready else endpoint.never_ready + 1
        if endpoint.never_ready == NEVER_READY:
            self._tell_off(endpoint.host, f"its endpoint does not get as far as MPI, see {endpoint.spec.log}")
