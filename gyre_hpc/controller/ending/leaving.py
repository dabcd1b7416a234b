"""The end of a run that ends early: whether something is still under way, and the last checkpoint.

The checkpoint is of the newest version, a step under way included. It is written when the controller's loop has stopped: its
messages go on being served, as long as the core lives and there is time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.controller.executions.executions import ExecutionTable
from gyre_hpc.controller.peers.inbound import Inbound
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.controller.training.batches import BatchRunner
from gyre_hpc.controller.training.weights import WeightKeeper, unsaved
from gyre_hpc.schedule.state import State

QUIET_S: Final = 10.0
"""A controller that leaves because nothing is under way has heard nothing for so long: reports may be on their way."""

LOOK_S: Final = 1.0
"""Longest time between two looks at what is left for the checkpoint."""


@dataclass
class Leaving:
    """`state` is the schedule's, `note` takes what comes from `peers`, `fault` tells a person."""

    state: Callable[[], State]
    executions: ExecutionTable
    batches: BatchRunner
    weights: WeightKeeper
    peers: Peers
    note: Callable[[Inbound], None]
    fault: Callable[[str, str], None]
    heard_at: float = field(default_factory=time.monotonic)
    """When the schedule heard something last."""

    def idle(self) -> bool:
        """Nothing runs, trains or is published, and the schedule has heard nothing for a while."""
        ledger = self.batches.ledger
        training = self.batches.committing or (ledger is not None and bool(ledger.open or ledger.unclaimed))
        running = any(True for _ in self.executions.started_and_unfinished())
        quiet = time.monotonic() - self.heard_at >= QUIET_S
        return quiet and not (running or training or self.weights.publishing is not None)

    async def save(self, left_s: Callable[[], float]) -> None:
        """Write it, unless the core dies or it takes longer than `left_s` says, which is asked about once a second."""
        began = time.monotonic()
        try:
            await self._serve_while(lambda: self.batches.committing, left_s)
            await self._save(left_s)
        except TimeoutError:
            words = f"no checkpoint of the newest version within {time.monotonic() - began:.0f} s"
            self.fault("core", words)

    async def _save(self, left_s: Callable[[], float]) -> None:
        state, weights = self.state(), self.weights
        version, core = unsaved(state, weights.checkpoint[0]), state.core
        if version is not None and core is not None:
            weights.save(core, version)
            await self._serve_while(
                lambda: weights.checkpoint[0] != version and self.state().core == core, left_s
            )

    async def _serve_while(self, condition: Callable[[], bool], left_s: Callable[[], float]) -> None:
        while condition():
            left = left_s()
            if left <= 0:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                self.note(await asyncio.wait_for(self.peers.inbox.get(), min(left, LOOK_S)))
