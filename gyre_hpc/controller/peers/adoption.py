"""Gateway and runner that outlived the controller before this one: heard out first, then taken up or ended.

`Survivors` waits, before the controller acts on anything, until each process that may have survived has said what it holds,
has ended, or has been silent for as long as makes a peer LOST; the last are ended. What others say meanwhile is kept in order.
`Holdings.keeps` is the rule (pure): an attempt goes on under its number if all parts that are still needed of it are there; what
only one of the two holds is ended there and repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.peers.inbound import Exited, Inbound, Said
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.launch.elsewhere.services import read_service
from gyre_hpc.launch.elsewhere.survivor import SurvivingProcess
from gyre_hpc.launch.incarnations import OUTLIVE
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ExecutionId
from gyre_hpc.transport.messages import Holding, PeerKind

log = logging.getLogger(__name__)
TURN_S = 0.25
"""Seconds between two looks at the clock and at whether to go on waiting."""
Attempt = tuple[ExecutionId, int]


@dataclass(frozen=True)
class Holdings:
    """What the survivors hold; None: the process of that kind is a fresh one."""

    gateway: frozenset[Attempt] | None = None
    runner: frozenset[Attempt] | None = None

    def keeps(self, attempt: Attempt, *, closed: bool, sealed: bool) -> bool:
        """Whether the attempt can go on. `closed`, `sealed`: the journal has its end, or the gateway's account of it.

        A harness that runs needs both; one that has ended only its records; a sealed attempt needs neither.
        """
        if closed and sealed:
            return True
        at_gateway = self.gateway is not None and attempt in self.gateway
        at_runner = self.runner is not None and attempt in self.runner
        return at_gateway and (closed or at_runner)

    def attempts(self) -> Iterator[Attempt]:
        """Whatever either holds."""
        yield from sorted((self.gateway or frozenset()) | (self.runner or frozenset()))


@dataclass
class Survivors:
    """`heard` is what peers said or did meanwhile, in order."""

    peers: Peers
    patience_s: float
    heard: list[Inbound] = field(default_factory=list)

    async def gather(self, go_on: Callable[[], bool]) -> Holdings:
        """What the expected processes hold. Those that did not say so are ended, and no longer among `peers.survivors`."""
        waiting, said = set(self.peers.survivors), dict[PeerKind, frozenset[Attempt]]()
        until = time.monotonic() + self.patience_s
        while waiting and time.monotonic() < until and go_on():
            with contextlib.suppress(TimeoutError):
                self._hear(await asyncio.wait_for(self.peers.inbox.get(), TURN_S), waiting, said)
        for kind in waiting:
            log.error(
                "%s: its process lives but has not said what it holds within %g s", kind, self.patience_s
            )
        self.peers.survivors.intersection_update(said)
        for kind, attempts in said.items():
            log.info("%s outlived its controller with %d attempts", kind, len(attempts))
        return Holdings(said.get(PeerKind.GATEWAY), said.get(PeerKind.RUNNER))

    def _hear(
        self, inbound: Inbound, waiting: set[PeerKind], said: dict[PeerKind, frozenset[Attempt]]
    ) -> None:
        match inbound:
            case Said(peer=(kind, _), message=Holding(attempts=attempts)) if kind in waiting:
                said[kind] = frozenset(attempts)
                waiting.discard(kind)
            case Exited(peer=(kind, _)) if kind in waiting:
                waiting.discard(kind)
            case _:
                self.heard.append(inbound)


def expect_survivors(peers: Peers, config: RunConfig, layout: RunLayout) -> None:
    """Look for the processes that the run folder names. Under Slurm none survives: a job ends with its controller.

    Those of a job of their own (`cluster.runners=external`) come by themselves, to the first controller as to later ones.
    """
    if config.cluster.runners == "external":
        for kind in OUTLIVE:
            peers.expect_external(kind)
    if config.cluster.kind != "local":
        return
    for kind in OUTLIVE:
        record = read_service(layout, kind)
        process = SurvivingProcess.find(f"{kind}-0", record.process) if record is not None else None
        if record is not None and process is not None:
            log.info("%s of pid %d outlived its controller: awaited", kind, process.pid)
            peers.expect(kind, record.incarnation, process)
