"""Between any two journaled steps of a switch, whoever dies: the run takes every step and counts every execution once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.inbound import Exited, Said
from gyre_hpc.controller.journal import Outcome, StepTaken, SwitchStep, read_journal
from gyre_hpc.controller.peers import Peer
from gyre_hpc.controller.phases import Phase
from gyre_hpc.controller.switch_steps import SwitchEnd, read_steps, read_switches
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind
from tests.controller.world import Cells, FakePeers, Interrupt, Services, make_controller, nothing, small_run

TO_TRAINING = ("drain", "prefetch", "cut", "export", "unroute", "release", "restore", "pull", "load", "join")
TO_ROLLOUT = ("flush", "pull", "offload", "write", "start", "resume", "load", "confirm", "route")
PUBLICATION = ("drain", "cut", "unroute", "pull", "write", "resume", "load", "confirm", "route")
START = ("pull", "write", "start", "resume", "load", "confirm", "route")
GAPS = [
    (direction, step)
    for direction, steps in (
        ("start", START),
        ("to_training", TO_TRAINING),
        ("to_rollout", TO_ROLLOUT[1:]),
        ("publication", PUBLICATION),
    )
    for step in steps
]


def done(cell: int, serial: msg.Serial, *steps: str) -> list[msg.Message]:
    return [msg.StepDone(cell, serial, step, 1.0, 2.0) for step in steps]  # type: ignore[arg-type]


class SteppingCells(Cells):
    """Tell every step of a switch."""

    def answer(self, cell: int, message: msg.Message) -> list[msg.Message]:
        answers = super().answer(cell, message)
        match message:
            case msg.BecomeEngine(serial=serial):
                return [*done(cell, serial, *TO_ROLLOUT[1:-1]), *answers]
            case msg.BecomeTrainer(serial=serial, weights=weights):
                pulls = () if weights is None else ("pull", "load")
                return [*done(cell, serial, "release", "restore", *pulls), *answers]
        return answers


class SteppingServices(Services):
    """The gateway tells every step of an Unroute."""

    def answer(self, message: msg.Message) -> list[tuple[PeerKind, msg.Message]]:
        answers = super().answer(message)
        if isinstance(message, msg.Unroute):
            steps = done(message.cell, message.serial, "drain", "prefetch", "cut", "export")
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


def run_config(direction: str) -> RunConfig:
    """Under `async` a publication finds cells in rollout; under `gyre` cells of the fakes are all training by then."""
    config = small_run(6)
    config.schedule.policy = "async" if direction == "publication" else "gyre"
    return config


def started(folder: Path, epoch: int, direction: str) -> tuple[Controller, SteppingPeers]:
    controller = make_controller(folder, run_config(direction), epoch, nothing, SteppingPeers)
    peers = controller.peers
    assert isinstance(peers, SteppingPeers)
    return controller, peers


def at_step(controller: Controller, direction: str, step: str, act: object, after: int) -> Iterator[None]:
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
async def test_the_controller_dies_behind_a_step(tmp_path: Path, direction: str, step: str) -> None:
    def dies(cell: int) -> None:
        raise Interrupt

    first, _ = started(tmp_path, 1, direction)
    watching = at_step(first, direction, step, dies, 1)
    next(watching)
    with pytest.raises(Interrupt):
        await first.run()
    *_, last = read_steps(tmp_path)
    assert (last.direction, last.step) == (direction, step)
    second, _ = started(tmp_path, 2, direction)
    assert await second.run() is None
    check(tmp_path)
    cut = [switch for switch in read_switches(tmp_path) if switch.end is SwitchEnd.INTERRUPTED]
    assert step in ("join", "route") or cut


@pytest.mark.parametrize("victim", ["source", "destination"])
@pytest.mark.parametrize(("direction", "step"), GAPS)
async def test_a_cell_dies_behind_a_step(tmp_path: Path, direction: str, step: str, victim: str) -> None:
    controller, peers = started(tmp_path, 1, direction)

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
    if victim == "source" and step not in ("join", "route"):
        assert lost and lost[0].direction == direction and step in [it.step for it in lost[0].steps]
