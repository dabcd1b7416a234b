"""Deaths of peers: each costs a restart that comes back after the window; too many at once end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from gyre_hpc.config import ClusterConfig
from gyre_hpc.controller.peers import Peer
from gyre_hpc.controller.supervision import Supervision
from gyre_hpc.errors import PeerLost
from gyre_hpc.transport.messages import PeerKind


class DyingPeers:
    """A cell that is dead whenever somebody looks."""

    def __init__(self) -> None:
        self.launched = 0

    def dead(self) -> list[Peer]:
        return [Peer(PeerKind.CELL, 1, dead=True)]

    async def launch(self, kind: PeerKind, index: int) -> None:
        self.launched += 1


class Bench:
    """Supervision of dying peers under a clock that the test moves."""

    def __init__(self, restarts: int, window_s: float) -> None:
        self.now = 0.0
        self.peers = DyingPeers()
        cluster = ClusterConfig(restarts=restarts, restart_window_s=window_s)
        self.supervision = Supervision(cast(Any, self.peers), cluster, Path("RUN"), lambda: self.now)

    async def die_at(self, now: float) -> None:
        self.now = now
        await self.supervision.relaunch_the_dead()


async def test_ordinary_losses_of_a_long_run_never_use_up_its_restarts() -> None:
    bench = Bench(restarts=2, window_s=3600)
    for loss in range(50):
        await bench.die_at(loss * 1800.0)
    assert bench.peers.launched == 50


async def test_one_death_more_than_the_restarts_within_the_window_ends_the_run() -> None:
    bench = Bench(restarts=2, window_s=3600)
    await bench.die_at(0)
    await bench.die_at(100)
    with pytest.raises(PeerLost, match=r"cell-1 died, and cluster\.restarts=2 within"):
        await bench.die_at(3599)
    assert bench.peers.launched == 2


async def test_without_restarts_the_first_death_ends_the_run() -> None:
    with pytest.raises(PeerLost, match="gyre train resume=RUN") as caught:
        await Bench(restarts=0, window_s=3600).die_at(0)
    assert "cluster.restart_window_s=3600" in str(caught.value)
