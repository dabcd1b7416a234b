"""Between any two journaled steps of a switch, whoever dies: the run takes every step and counts every execution once.

This is the controller's side alone: cells and gateway are stand-ins that tell their steps without taking them. What real
cells leave when they are killed behind a step stands in tests/cells/test_leader.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.cells.switch_steps import LAST, SwitchEnd, read_switches
from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.journal.entries import Direction, Outcome, StepTaken, SwitchStep
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.controller.peers.inbound import Exited, Said
from gyre_hpc.controller.peers.peers import Peer
from gyre_hpc.controller.steps import WORK_S, Steps
from gyre_hpc.records import CellId
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind, StepName
from tests.controller.world import Cells, FakePeers, Interrupt, Services, make_controller, nothing, small_run

GATEWAY = (StepName.DRAIN, StepName.PREFETCH, StepName.CUT, StepName.EXPORT, StepName.PULL_PAGES)
TRAINER = (StepName.LEDGER, StepName.RELEASE, StepName.RESTORE, StepName.PULL, StepName.LOAD)
CONTROLLER = (StepName.UNROUTE, StepName.FLUSH, StepName.JOIN, StepName.ROUTE, StepName.LOST)
NOT_ENGINE = {*GATEWAY, *CONTROLLER, StepName.RELEASE, StepName.RESTORE}
ENGINE = tuple(step for step in StepName if step not in NOT_ENGINE)
"""Every other step: one that is added is a gap too."""
LOADED = tuple(step for step in ENGINE if step is not StepName.OFFLOAD)
"""What a cell goes through that has not trained."""
STEPS = {
    Direction.START: (*LOADED, StepName.ROUTE),
    Direction.TO_TRAINING: (*GATEWAY, StepName.UNROUTE, *TRAINER, StepName.JOIN),
    Direction.TO_ROLLOUT: (StepName.FLUSH, *ENGINE, StepName.ROUTE),
    Direction.PUBLICATION: (*GATEWAY, StepName.UNROUTE, *LOADED, StepName.ROUTE),
}
GAPS = [(direction, step) for direction, steps in STEPS.items() for step in steps]


LAST_OF_BATCH = 7
"""Id of the last execution of the first batch."""


def done(cell: CellId, serial: msg.Serial, *steps: StepName) -> list[msg.Message]:
    return [msg.StepDone(cell, serial, step, 1.0, 2.0) for step in steps]


class SteppingCells(Cells):
    """Tell every step of a switch."""

    def answer(self, cell: int, message: msg.Message) -> list[msg.Message]:
        answers = super().answer(cell, message)
        match message:
            case msg.BecomeEngine(serial=serial):
                return [*done(CellId(cell), serial, *ENGINE), *answers]
            case msg.BecomeTrainer(serial=serial, weights=weights):
                pulls = {StepName.PULL, StepName.LOAD} if weights is None else set()
                steps = (step for step in TRAINER if step not in pulls)
                return [*done(CellId(cell), serial, *steps), *answers]
        return answers


class SteppingServices(Services):
    """The gateway tells every step of an Unroute. Execution `slow` ends when `held` is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: int | None = None
        self.held: list[tuple[PeerKind, msg.Message]] = []

    def answer(self, message: msg.Message) -> list[tuple[PeerKind, msg.Message]]:
        answers = super().answer(message)
        if isinstance(message, msg.StartExecution) and message.execution == self.slow:
            self.slow, self.held = None, answers
            return []
        if isinstance(message, msg.Unroute):
            steps = done(message.cell, message.serial, *GATEWAY)
            return [*((PeerKind.GATEWAY, step) for step in steps), *answers]
        return answers


class NoNodes:
    """Every death is the process's own."""

    happened = 0

    def stir(self) -> None: ...

    async def took(self, nodes: tuple[str, ...], *, unanswered: bool) -> bool:
        return False

    def died(self, nodes: tuple[str, ...], cause: str) -> None: ...


class SteppingPeers(FakePeers):
    """Peers that tell their steps and are started again when they have ended."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.cells, self.services, self.nodes = SteppingCells(), SteppingServices(), NoNodes()

    def send(self, kind: PeerKind, index: int, message: msg.Message) -> None:
        super().send(kind, index, message)
        services = self.services
        if isinstance(message, msg.FlushContribution) and isinstance(services, SteppingServices):
            for who, answer in services.held:
                self.inbox.put_nowait(Said((who, 0), answer))
            services.held = []

    def dead(self) -> list[Peer]:
        """Those whose end has been heard of."""
        waiting = [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        for item in waiting:
            self.inbox.put_nowait(item)
        unheard = {item.peer for item in waiting if isinstance(item, Exited)}
        return [peer for peer in self.peers.values() if peer.dead and peer.id not in unheard]

    def cut_off(self, cell: int) -> None:
        """SIGKILL: nothing the cell has said since is heard."""
        waiting = [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        for item in waiting:
            if not (isinstance(item, Said) and item.peer == (PeerKind.CELL, cell)):
                self.inbox.put_nowait(item)
        self.vanish(cell)


def run_config(direction: Direction) -> RunConfig:
    """Under `async` a publication finds cells in rollout; under `gyre` cells of the fakes are all training by then."""
    config = small_run(6)
    config.schedule.policy = "async" if direction is Direction.PUBLICATION else "gyre"
    return config


def started(folder: Path, epoch: int, direction: Direction) -> tuple[Controller, SteppingPeers]:
    controller = make_controller(folder, run_config(direction), epoch, nothing, SteppingPeers)
    peers = controller.peers
    assert isinstance(peers, SteppingPeers)
    return controller, peers


def provoke(step: StepName, controller: Controller, peers: SteppingPeers) -> None:
    """A flush is due only if capacity is lost in mid-batch: all cells in rollout die once a satellite has work and one of
    the batch's executions is still to run."""
    if step is not StepName.FLUSH:
        return
    assert isinstance(peers.services, SteppingServices)
    peers.services.slow = LAST_OF_BATCH
    steps = controller.reception.steps
    micro_step_done = steps.micro_step_done

    def done(cell: CellId, message: msg.MicroStepDone) -> None:
        micro_step_done(cell, message)
        if cell != steps.state.core:
            steps.micro_step_done = micro_step_done  # type: ignore[method-assign]
            for row in controller.cells.cells.values():
                if row.phase is Phase.ROLLOUT:
                    peers.cut_off(row.id)

    steps.micro_step_done = done  # type: ignore[method-assign]


def at_step(
    controller: Controller, direction: Direction, step: StepName, act: object, after: int
) -> Iterator[None]:
    """Call `act` with the cell as soon as the `after`-th step of this kind is in the journal, once."""
    journal = controller.cells.steps._journal
    left = [after]

    def dying(entry: SwitchStep) -> None:
        journal(entry)
        if (entry.direction, entry.step) == (direction, step):
            left[0] -= 1
            if left[0] == 0:
                act(entry.cell)  # type: ignore[operator]

    controller.cells.steps._journal = dying
    yield
    assert left[0] <= 0, f"no step {step} of {direction} was taken {after} times"


def check(folder: Path) -> None:
    entries = list(read_journal(folder / "journal"))
    ids = [entry.outcome.execution for entry in entries if isinstance(entry, Outcome)]
    versions = [entry.version for entry in entries if isinstance(entry, StepTaken)]
    assert sorted(ids) == list(range(len(ids)))
    assert versions == list(range(1, len(versions) + 1)) and len(versions) >= 6


@pytest.mark.parametrize(("direction", "step"), GAPS)
async def test_the_controller_dies_behind_a_step(
    tmp_path: Path, direction: Direction, step: StepName
) -> None:
    def dies(cell: int) -> None:
        raise Interrupt

    first, peers = started(tmp_path, 1, direction)
    provoke(step, first, peers)
    watching = at_step(first, direction, step, dies, 1)
    next(watching)
    with pytest.raises(Interrupt):
        await first.run()
    *_, last = (it for it in read_journal(tmp_path / "journal") if isinstance(it, SwitchStep))
    assert (last.direction, last.step) == (direction, step)
    second, _ = started(tmp_path, 2, direction)
    assert await second.run() is None
    check(tmp_path)
    cut = [switch for switch in read_switches(tmp_path) if switch.end is SwitchEnd.INTERRUPTED]
    assert step in LAST or cut


@pytest.mark.parametrize("victim", ["source", "destination"])
@pytest.mark.parametrize(("direction", "step"), GAPS)
async def test_a_cell_dies_behind_a_step(
    tmp_path: Path, direction: Direction, step: StepName, victim: str
) -> None:
    controller, peers = started(tmp_path, 1, direction)
    provoke(step, controller, peers)

    def dies(cell: int) -> None:
        rows = controller.cells.cells.values()
        others = sorted((row.phase is not Phase.ROLLOUT, row.id) for row in rows if row.id != cell)
        peers.cut_off(cell if victim == "source" else others[0][1])

    watching = at_step(controller, direction, step, dies, 1)
    next(watching)
    assert await controller.run() is None
    with pytest.raises(StopIteration):
        next(watching)
    check(tmp_path)
    lost = [switch for switch in read_switches(tmp_path) if switch.end is SwitchEnd.LOST]
    assert all(switch.steps[-1].outcome for switch in lost)
    if victim == "source" and step not in LAST:
        assert lost and lost[0].direction == direction and step in [it.step for it in lost[0].steps]


def test_the_time_for_which_a_job_is_suspended_is_no_trainers_fault() -> None:
    state: Any = SimpleNamespace(core=None)
    batches: Any = SimpleNamespace(ledger=None)
    weights: Any = SimpleNamespace(restoring=CellId(1), publishing=None)
    nobody: Any = None
    driver: Any = SimpleNamespace(state=state)
    steps = Steps(RunConfig(), driver, nobody, batches, weights, nobody, nobody)
    for now in (5.0, 5.0 + 9 * WORK_S):
        assert steps.overdue(now) == []
    looks = [steps.overdue(6.0 + 9 * WORK_S + second) for second in range(0, int(WORK_S) + 10, 5)]
    assert [it for it in looks if it] == [[(CellId(1), "restoring a checkpoint")]]


class HungCells(SteppingCells):
    """The first cell that hears such a message does nothing more, but beats on."""

    def __init__(self, at: type[msg.Message]) -> None:
        super().__init__()
        self.hung, self._at = list[int](), at

    def answer(self, cell: int, message: msg.Message) -> list[msg.Message]:
        work = not isinstance(message, msg.Claimed) or message.micro_step is not None
        if isinstance(message, self._at) and work and not self.hung:
            self.hung.append(cell)
            return []
        return super().answer(cell, message)


HANGS: dict[str, tuple[type[msg.Message], StepName, str]] = {
    "leaves in mid batch": (msg.FlushContribution, StepName.FLUSH, "its contribution to batch 0"),
    "batch closes": (msg.FlushContribution, StepName.ROUTE, "its contribution to batch 0"),
    "works": (msg.Claimed, StepName.ROUTE, "micro-step 0.0"),
    "steps": (msg.CommitBatch, StepName.ROUTE, "the step of batch 0"),
    "publishes": (msg.PublishWeights, StepName.ROUTE, "publishing version 1"),
    "restores": (msg.RestoreTrainer, StepName.ROUTE, "restoring a checkpoint"),
}


@pytest.mark.parametrize(("at", "step", "what"), HANGS.values(), ids=HANGS)
async def test_a_cell_whose_trainer_hangs_is_restarted_and_its_work_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: type[msg.Message], step: StepName, what: str
) -> None:
    monkeypatch.setattr("gyre_hpc.controller.steps.WORK_S", 0.0)
    config = run_config(Direction.TO_ROLLOUT)
    config.schedule.steps_per_burst = 1
    controller = make_controller(tmp_path, config, 1, nothing, SteppingPeers)
    peers = cast(SteppingPeers, controller.peers)
    peers.cells = cells = HungCells(at)
    provoke(step, controller, peers)
    faults: list[tuple[str, str]] = []
    fault = controller.observer.fault

    def heard(who: str, what: str) -> None:
        faults.append((who, what))
        fault(who, what)

    controller.observer.fault = heard  # type: ignore[method-assign]
    async with asyncio.timeout(60.0):
        assert await controller.run() is None
    check(tmp_path)
    (hung,) = cells.hung
    named = [(who, said.partition(" is not done")[0]) for who, said in faults if "is not done after" in said]
    assert named == [(f"cell-{hung}", what)], "told once"
