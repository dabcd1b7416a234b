"""What peers say and do, by what it costs whom: a peer that contradicts itself costs that peer, never the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gyre_hpc.config import ModelConfig, RunConfig
from gyre_hpc.controller.peers.inbound import Exited, PeerId, Said
from gyre_hpc.controller.reception import Reception
from gyre_hpc.controller.steps import Steps
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule.machine import initial_state
from gyre_hpc.schedule.settings import Settings
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind
from tests.controller.test_batches import CORE, SAT, group, manifest
from tests.controller.test_batches import World as Batch


class World:
    """A reception over a real batch of two cells; everything else only remembers."""

    def __init__(self) -> None:
        self.batch = Batch()
        self.killed: list[PeerId] = []
        self.faults: list[tuple[str, str]] = []
        self.lost: list[int] = []
        nobody: Any = None
        executions: Any = SimpleNamespace(outcomes=dict)
        cells: Any = SimpleNamespace(lost=self.lost.append, cells={})
        weights: Any = SimpleNamespace(finish_publication=lambda: None, cell_lost=lambda cell, core: None)
        peers: Any = SimpleNamespace(kill=lambda kind, index: self.killed.append((kind, index)))
        observer: Any = SimpleNamespace(fault=lambda who, what: self.faults.append((who, what)))
        supervision: Any = SimpleNamespace(exited=lambda peer, code, asked, guest: f"exited with {code}")
        guests: Any = SimpleNamespace(has=lambda cell: False)
        driver: Any = SimpleNamespace(state=initial_state(Settings((4, 4))))
        config = RunConfig(model=ModelConfig(path="unused"))
        batches = self.batch.runner
        steps = Steps(config, driver, cells, batches, weights, nobody, observer)
        self.reception = Reception(
            config,
            peers,
            driver,
            executions,
            cells,
            batches,
            weights,
            steps,
            nobody,
            observer,
            supervision,
            guests,
        )
        batches.add_group(*group(1, 2))
        batches.enrol(CORE)
        batches.enrol(SAT)

    def said(self, cell: CellId, message: msg.Message) -> None:
        self.reception.note(Said((PeerKind.CELL, cell), message))


def contradictions(world: World) -> dict[str, msg.Message]:
    """What a satellite that did one of two micro-steps, and was asked for its contribution, cannot have meant."""
    done = world.batch.work(SAT)
    world.batch.runner.close()
    return {
        "other work": msg.Contribution(0, ("9.9",), manifest("g", 3)),
        "no gradient": msg.Contribution(0, (done,), None),
        "work that nobody gave it": msg.MicroStepDone(0, "1.1", 0.1, {}),
        "a region that nobody named": msg.MicroStepUnavailable(0, "1.1", "dropped"),
        "a step, which is the core's": msg.BatchCommitted(0, Version(4), {}),
        "what no cell says": msg.Seal(),
    }


@pytest.mark.parametrize("which", sorted(contradictions(World())))
def test_a_satellite_that_contradicts_itself_is_ended_and_its_work_returns(which: str) -> None:
    world = World()
    message = contradictions(world)[which]
    if isinstance(message, msg.BatchCommitted):
        world.reception.steps.driver.state = open_batch(world)
    world.said(SAT, message)
    assert world.killed == [(PeerKind.CELL, SAT)]
    [(who, why)] = world.faults
    assert who == "cell-1" and "cell 1" in why and not world.batch.of(msg.CommitBatch)
    world.reception.note(Exited((PeerKind.CELL, int(SAT)), 1, -9))
    assert world.lost == [SAT] and world.batch.counts[-1] == (2, 0)
    assert {world.batch.work(CORE), world.batch.work(CORE)} == {"1.0", "1.1"}


def open_batch(world: World) -> Any:
    """The schedule's view of the open batch."""
    return SimpleNamespace(core=CORE, open_batch=SimpleNamespace(index=0, groups=()))


def test_nothing_more_is_heard_of_a_cell_that_contradicted_itself_until_it_has_ended() -> None:
    world = World()
    done = world.batch.work(SAT)
    world.batch.runner.close()
    world.said(SAT, msg.MicroStepDone(0, "9.9", 0.1, {}))
    world.said(SAT, msg.Contribution(0, (done,), manifest("g", 3)))
    assert not world.batch.runner.contributions and len(world.killed) == 1
    world.reception.note(Exited((PeerKind.CELL, int(SAT)), 1, -9))
    world.batch.runner.enrol(SAT)
    world.said(SAT, msg.Claim(0))
    assert [cell for cell, _ in world.batch.of(msg.Claimed)] == [SAT, SAT]


def test_a_service_that_says_what_no_service_says_is_restarted() -> None:
    world = World()
    world.reception.note(Said((PeerKind.GATEWAY, 0), msg.Seal()))
    assert world.killed == [(PeerKind.GATEWAY, 0)]
    assert world.faults == [("gateway", "the gateway sent Seal; it is restarted")]


def test_a_cell_that_cannot_pull_from_a_core_that_lives_is_restarted_and_none_while_the_core_is_restored() -> (
    None
):
    world = World()
    cells, state = world.reception.cells, world.reception.driver.state
    cells.starved = lambda now: [SAT]  # type: ignore[method-assign]
    world.reception.weights.restoring = None
    for lost in (msgspec.structs.replace(state, core=None), msgspec.structs.replace(state, restoring=True)):
        world.reception.driver.state = lost
        world.reception.restart_the_starved(now=1e9)
        assert not world.killed
    world.reception.driver.state = state
    world.reception.restart_the_starved(now=1e9)
    assert world.killed == [(PeerKind.CELL, SAT)]


def test_a_peer_with_a_sigterm_is_heard_and_goes_on() -> None:
    world, asked = World(), list[str]()
    world.reception.asked_to_end = asked.append
    world.reception.guests = SimpleNamespace(has=lambda cell: False)  # type: ignore[assignment]
    world.said(SAT, msg.AskedToEnd("SIGTERM"))
    world.reception.note(Said((PeerKind.RUNNER, 0), msg.AskedToEnd("SIGTERM")))
    assert asked == [f"cell-{SAT}", "runner"] and not world.killed and not world.faults
