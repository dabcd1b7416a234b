"""Deaths of peers: each costs a restart that comes back after the window; too many at once end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.controller.peers.inbound import NOT_STARTED
from gyre_hpc.controller.peers.nodes import MOST_S
from gyre_hpc.controller.peers.peers import Peer
from gyre_hpc.controller.peers.supervision import RETRY_S, Death, Supervision
from gyre_hpc.errors import NodeUnfit, NoRoom, PeerLost
from gyre_hpc.transport.messages import PeerKind


class Handle:
    """A process that has ended on node n1."""

    nodes, unanswered = ("n1",), False


class DyingPeers:
    """A cell that is dead whenever somebody looks. `rooms`: what each launch finds; `nodes` are its own judge."""

    def __init__(self) -> None:
        self.launched = self.tried = 0
        self.cell = Peer(PeerKind.CELL, 1, dead=True, handle=cast(Any, Handle()))
        self.peers = {self.cell.id: self.cell, (PeerKind.CELL, 0): Peer(PeerKind.CELL, 0)}
        self.nodes, self.room, self.lost = self, True, False
        self.blamed: list[str] = []
        self.happened = 0

    def dead(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.dead]

    async def launch(self, kind: PeerKind, index: int) -> None:
        self.tried += 1
        if not self.room:
            raise NoRoom("cell-1 needs a node")
        self.launched += 1

    def stir(self) -> None:
        self.happened += 1

    async def took(self, nodes: tuple[str, ...], *, unanswered: bool) -> bool:
        return self.lost

    def died(self, nodes: tuple[str, ...], words: str) -> None:
        self.blamed += [f"{node}: {words}" for node in nodes]

    is_unfit = died


class Bench:
    """Supervision of dying peers under a clock that the test moves."""

    def __init__(self, restarts: int, window_s: float, standalone: int = 0) -> None:
        self.now = 0.0
        self.peers = DyingPeers()
        cluster = ClusterConfig(restarts=restarts, restart_window_s=window_s, standalone=standalone)
        self.told: list[str] = []
        self.supervision = Supervision(
            cast(Any, self.peers),
            cluster,
            Path("RUN"),
            lambda who, what: self.told.append(f"{who} {what}"),
            lambda: self.now,
        )

    async def die_at(self, now: float, code: int = 1) -> None:
        self.now = now
        self.supervision.exited((PeerKind.CELL, 1), code)
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
    with pytest.raises(PeerLost, match=r"cell-1 on n1 died, and cluster\.restarts=2 within"):
        await bench.die_at(3599)
    assert bench.peers.launched == 2


async def test_without_restarts_the_first_death_ends_the_run() -> None:
    with pytest.raises(PeerLost, match="gyre train resume=RUN") as caught:
        await Bench(restarts=0, window_s=3600).die_at(0)
    assert "cluster.restart_window_s=3600" in str(caught.value)


async def test_a_death_by_the_loss_of_its_node_costs_no_restart_and_does_not_count_twice() -> None:
    bench = Bench(restarts=1, window_s=3600)
    bench.peers.lost = True
    for now in range(5):
        await bench.die_at(now)
    assert bench.peers.launched == 5 and not bench.peers.blamed
    bench.peers.lost = False
    await bench.die_at(6)
    with pytest.raises(PeerLost):
        await bench.die_at(7)
    assert bench.peers.blamed == ["n1: cell-1: exited with 1"] * 2


async def test_an_unfit_node_costs_no_restart() -> None:
    bench = Bench(restarts=0, window_s=3600)
    await bench.die_at(0, NodeUnfit.exit_code)
    assert bench.peers.launched == 1 and len(bench.peers.blamed) == 1


async def test_a_cell_without_room_waits_is_told_of_once_and_comes_back_when_there_is_room() -> None:
    bench = Bench(restarts=1, window_s=3600)
    bench.peers.room = False
    await bench.die_at(0)
    tries: list[int] = []
    for now in range(1, 1000):
        before, bench.now = bench.peers.tried, now
        assert await bench.supervision.relaunch_the_dead() == []
        tries += [now] * (bench.peers.tried - before)
    assert tries[:5] == [5, 15, 35, 75, 135], "ever less often"
    assert tries[-1] - tries[-2] == MOST_S
    assert bench.told == [
        "cell-1 lost on n1; no node left has room for it: the run goes on with 1 of 2 cells"
    ]
    bench.peers.room = True
    assert await bench.supervision.relaunch_the_dead() == []
    bench.peers.stir()
    assert await bench.supervision.relaunch_the_dead() == [bench.peers.cell]
    assert bench.told[1].startswith("cell-1 starts again on n1")


@pytest.mark.parametrize("standalone", [0, 1])
async def test_a_run_without_any_cell_that_trains_ends_when_no_node_had_room_for_long(
    standalone: int,
) -> None:
    bench = Bench(restarts=1, window_s=3600, standalone=standalone)
    bench.peers.room = False
    bench.peers.peers[PeerKind.CELL, 0].dead = True
    if standalone:
        bench.peers.peers[PeerKind.CELL, 2] = Peer(PeerKind.CELL, 2)
    bench.supervision.exited((PeerKind.CELL, 0), NOT_STARTED)
    await bench.die_at(0, NOT_STARTED)
    with pytest.raises(PeerLost, match="no cell that trains is left"):
        for now in range(1, 1000):
            bench.now = now
            await bench.supervision.relaunch_the_dead()
    assert bench.now > 300


async def test_of_many_cells_without_room_one_is_tried_at_a_time() -> None:
    """Each try asks Slurm several things, and the controller waits for the answers."""
    bench = Bench(restarts=9, window_s=3600)
    bench.peers.room = False
    for index in range(2, 50):
        peer = Peer(PeerKind.CELL, index, dead=True)
        bench.peers.peers[peer.id] = peer
    bench.supervision._deaths = {peer.id: Death(NOT_STARTED, "", False) for peer in bench.peers.dead()}
    await bench.supervision.relaunch_the_dead()
    before = bench.peers.tried
    for round in range(1, 4):
        bench.now = (2**round - 1) * RETRY_S
        await bench.supervision.relaunch_the_dead()
        assert bench.peers.tried == before + round
    bench.peers.room, bench.now = True, 200.0
    assert len(await bench.supervision.relaunch_the_dead()) == 49
