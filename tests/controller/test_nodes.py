"""Nodes as the controller knows them: silence keeps steps away until the node answers, a loss is named once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.controller.peers.nodes import LOOK_S, MOST_S, Nodes
from gyre_hpc.launch.nodes.bad_nodes import BadNodes
from gyre_hpc.layout import RunLayout


class Site:
    """Two nodes: what Slurm says of them, and whether they answer."""

    def __init__(self) -> None:
        self.up: frozenset[str] | None = frozenset({"n0", "n1"})
        self.answering: set[str] = {"n0", "n1"}
        self.asked = 0

    async def usable(self) -> frozenset[str] | None:
        self.asked += 1
        return self.up

    async def answers(self, node: str) -> bool:
        return node in self.answering


class Bench:
    def __init__(self, folder: Path) -> None:
        self.site, self.told, self.now = Site(), list[str](), 0.0
        self.nodes = Nodes(
            cast(Any, self.site),
            BadNodes(RunLayout(folder), ClusterConfig(bad_node_deaths=2)),
            lambda who, what: self.told.append(f"{who}: {what}"),
            lambda: self.now,
        )

    async def look(self, *, amiss: bool = True, inhabited: frozenset[str] = frozenset()) -> None:
        """A look at the next time when one is due."""
        self.now += LOOK_S
        self.nodes.look(amiss, inhabited)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_nobody_asks_slurm_while_all_is_well(bench: Bench) -> None:
    for _ in range(5):
        await bench.look(amiss=False)
    assert bench.site.asked == 0
    for _ in range(5):
        bench.nodes.look(True, ())
    await bench.look()
    assert bench.site.asked == 1


async def test_slurm_is_asked_ever_less_often_while_nothing_happens_and_soon_when_something_does(
    bench: Bench,
) -> None:
    for _ in range(120):
        await bench.look()
    assert bench.site.asked == 4 + (120 * LOOK_S - 75) // MOST_S, "at 5, 15, 35 and 75 s, then 60 s apart"
    before = bench.site.asked
    bench.nodes.stir()
    await bench.look()
    assert bench.site.asked == before + 1
    bench.site.up = frozenset({"n0"})
    for _ in range(2):
        await bench.look()
    assert bench.nodes.happened == 2 and bench.site.asked == before + 2
    for _ in range(2):
        await bench.look()
    assert bench.site.asked == before + 3, "a lost node is something that happened"


async def test_a_silent_node_gets_nothing_until_a_peer_on_it_speaks(bench: Bench) -> None:
    bench.nodes.fell_silent(("n1",))
    await bench.look(inhabited=frozenset({"n1"}))
    assert bench.nodes.never == {"n1"}, "it is inhabited: nobody starts a probe"
    bench.nodes.heard(("n1",))
    assert not bench.nodes.never


async def test_a_silent_node_without_peers_gets_a_process_again_when_a_probe_starts(bench: Bench) -> None:
    bench.site.answering = {"n0"}
    assert await bench.nodes.took(("n1",), unanswered=True)
    await bench.look(amiss=False)
    assert bench.nodes.never == {"n1"}
    bench.site.answering = {"n0", "n1"}
    for _ in range(2):
        await bench.look(amiss=False)
    assert not bench.nodes.never and not bench.told


async def test_a_lost_node_is_named_once_and_took_what_ended_on_it(bench: Bench) -> None:
    await bench.look()
    bench.site.up = frozenset({"n0"})
    assert await bench.nodes.took(("n1",), unanswered=False)
    assert not await bench.nodes.took(("n0",), unanswered=False)
    await bench.look()
    assert len(bench.told) == 1 and bench.told[0].startswith("node n1: bad: lost")
    assert bench.nodes.bad.names == {"n1"}


async def test_where_nobody_says_no_node_is_lost(bench: Bench) -> None:
    bench.site.up = None
    assert not await bench.nodes.took(("n1",), unanswered=False)
    assert not bench.nodes.bad.names


async def test_deaths_and_failed_probes_are_told_with_their_last_words(bench: Bench) -> None:
    bench.nodes.died(("n0",), "cell-0: CUDA error")
    bench.nodes.died(("n0",), "cell-0: CUDA error")
    bench.nodes.is_unfit(("n1",), "nhc: /scratch is full")
    assert bench.nodes.never == {"n1"} and bench.nodes.bad.names == {"n0", "n1"}
    assert "CUDA error" in bench.told[0] and "/scratch is full" in bench.told[1]


async def test_a_bad_node_that_slurm_gives_to_the_next_job_is_named_once(tmp_path: Path) -> None:
    """A requeued job cannot be kept from it: the nodes of others are no concern."""
    before = BadNodes(RunLayout(tmp_path), ClusterConfig())
    before.lost("n1", "the batch host of job 7")
    before.lost("n9", "elsewhere")
    bench = Bench(tmp_path)
    await bench.look()
    await bench.look()
    (told,) = bench.told
    assert told.startswith("node n1: given to this run again though bad") and "batch host of job 7" in told
    assert bench.nodes.bad.names == {"n1", "n9"}
