"""The job of gateway and runner under `cluster.runners=external`, watched by the controller of the run.

While one of the two is away Slurm is asked about their job, off the loop. A job that has ended is submitted again, or ends
the run with an error, as `cluster.job.service_lost` says; a state that is not known is no end. Without a job of ours somebody
has started them by hand (`gyre services RUN`) and is waited for. When the run ends before its services have come, nobody would
tell them so: their job is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.errors import PeerLost
from gyre_hpc.launch.commands import SlurmCommandFailed, query
from gyre_hpc.launch.elsewhere.service_job import services_job, submit_services
from gyre_hpc.launch.incarnations import OUTLIVE
from gyre_hpc.launch.job.state import ENDED, job_state
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)
LOOK_S: Final = 10.0
"""Seconds between two questions to Slurm while one of the two is away."""
REFUSALS: Final = 30
"""Submissions in a row that may fail: slurmctld may be away for minutes."""


@dataclass
class ExternalServices:
    """`fault(who, what)` tells the person who watches."""

    config: RunConfig
    layout: RunLayout
    peers: Peers
    fault: Callable[[str, str], None]
    _look: asyncio.Task[str] | None = None
    _looked_at: float = 0.0
    _submissions: int = 0
    _refusals: int = 0

    def check(self) -> None:
        """To be called often. Raises PeerLost when their job has ended and is not to be submitted again."""
        if self._look is not None:
            if self._look.done():
                look, self._look = self._look, None
                if said := look.result():
                    self.fault("services", said)
        elif self.peers.missing() and time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            self._look = asyncio.create_task(asyncio.to_thread(self._ask))

    async def end(self) -> None:
        """The run is over. Services with a link have been told; where both are away, their job ends here."""
        if self._look is not None:
            await asyncio.wait([self._look])
            if (error := self._look.exception()) is not None:
                log.warning("%s", error)
            elif said := self._look.result():
                self.fault("services", said)
        if len(self.peers.missing()) == len(OUTLIVE):
            await asyncio.to_thread(self._cancel)

    def _cancel(self) -> None:
        job = services_job(self.layout)
        if not job or job_state(job) in ENDED:
            return
        try:
            query("scancel", job)
            log.info("job %s of gateway and runner is cancelled: the run is over", job)
        except SlurmCommandFailed as error:
            log.error("job %s of gateway and runner waits for a run that is over: %s", job, error.message)

    def _ask(self) -> str:
        """What was done about it; "" if nothing had to be."""
        job = services_job(self.layout)
        if not job:
            log.info("waiting for gateway and runner: gyre services %s", self.layout.root)
            return ""
        state = job_state(job)
        if state not in ENDED:
            log.info("waiting for gateway and runner: their job %s is %s", job, state or "not known to Slurm")
            return ""
        ended = f"the job of gateway and runner ({job}) is {state}"
        cluster = self.config.cluster
        if cluster.job.service_lost == "end" or self._submissions >= cluster.restarts:
            raise PeerLost(
                f"{self.layout.root}: {ended}",
                fix=f"gyre submit resume={self.layout.root} submits it again; see {self.layout.jobs / f'{job}.log'}",
            )
        try:
            again = submit_services(self.config, self.layout).job
        except SlurmCommandFailed as error:
            self._refusals += 1
            if self._refusals > REFUSALS:
                raise
            log.warning("%s", error)
            return f"{ended}, and not submitted yet: {error.message}" if self._refusals == 1 else ""
        self._submissions, self._refusals = self._submissions + 1, 0
        return f"{ended}: submitted again as job {again}"
