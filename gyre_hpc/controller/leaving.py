"""The end of a run that ends early: whether something is still under way, and the last checkpoint.

The checkpoint is of the newest version, a step under way included. It is written when the controller's loop has stopped: its
messages go on being served, as long as the core lives and there is time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.controller.reception import Reception
from gyre_hpc.controller.weights import unsaved

QUIET_S: Final = 10.0
"""A controller that leaves because nothing is under way has heard nothing for so long: reports may be on their way."""


@dataclass
class Leaving:
    """`reception` holds the state machines of the controller."""

    reception: Reception
    heard_at: float = field(default_factory=time.monotonic)
    """When the schedule heard something last."""

    def idle(self) -> bool:
        """Nothing runs, trains or is published, and the schedule has heard nothing for a while."""
        its = self.reception
        ledger = its.batches.ledger
        training = its.batches.committing or (ledger is not None and bool(ledger.open or ledger.unclaimed))
        running = any(True for _ in its.executions.started_and_unfinished())
        quiet = time.monotonic() - self.heard_at >= QUIET_S
        return quiet and not (running or training or its.weights.publishing is not None)

    async def save(self, within_s: float) -> None:
        """Write it, unless the core dies or takes longer."""
        try:
            async with asyncio.timeout(within_s):
                await self._serve_while(lambda: self.reception.batches.committing)
                await self._save()
        except TimeoutError:
            words = f"no checkpoint of the newest version within {within_s:.0f} s"
            self.reception.observer.fault("core", words)

    async def _save(self) -> None:
        driver, weights = self.reception.driver, self.reception.weights
        version, core = unsaved(driver.state, weights.checkpoint[0]), driver.state.core
        if version is not None and core is not None:
            weights.save(core, version)
            await self._serve_while(lambda: weights.checkpoint[0] != version and driver.state.core == core)

    async def _serve_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            self.reception.note(await self.reception.peers.inbox.get())
