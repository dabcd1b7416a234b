"""Guests as the controller sees them: they come, leave in order or vanish at any moment, and the run takes all its steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.guests import RESTARTS
from gyre_hpc.controller.journal.entries import GuestsJoined, Happened, StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.controller.peers.inbound import HostSaid
from gyre_hpc.launch.elsewhere.remote import RemoteProcess
from gyre_hpc.records import CellId
from gyre_hpc.schedule.protocol import CellAdded, CellKind, CellLost
from gyre_hpc.transport import messages as msg
from gyre_hpc.transport.messages import PeerKind, ProcessSerial
from tests.controller.world import FakePeers, Interrupt, make_controller, small_run

STEPS = 6


class Link:
    """The controller's end of a host's link."""

    def __init__(self, pid: int = 1) -> None:
        self.hello = msg.Hello(PeerKind.CELL_HOST, pid, pid, "elsewhere", "")
        self.name, self.said = f"host {pid}", list[msg.Message]()
        self.silent = 0.0
        self.abandoned = False

    def send(self, message: msg.Message) -> None:
        self.said.append(message)

    def silent_s(self) -> float:
        return self.silent

    def abandon(self) -> None:
        self.abandoned = True

    def __deepcopy__(self, memo: object) -> Link:
        return self


def peers_of(controller: Controller) -> FakePeers:
    return cast(FakePeers, controller.peers)


def says(controller: Controller, link: Link, message: msg.Message | None) -> None:
    peers_of(controller).inbox.put_nowait(HostSaid(cast(Any, link), message))


def offer(cells: int = 1, *, rollout_only: bool = False) -> msg.OfferCells:
    return msg.OfferCells(cells, rollout_only, "17")


def ids_of(controller: Controller) -> list[CellId]:
    return sorted(cell.id for cell in controller.cells.present if cell.kind is not CellKind.OWN)


def gone_of(controller: Controller) -> list[CellId]:
    return sorted(cell.id for cell in controller.cells.cells.values() if cell.gone)


class Script:
    """What happens at which message that the controller sends."""

    def __init__(self, acts: dict[int, Callable[[Controller], None]]) -> None:
        self.acts, self.count = acts, 0

    def __call__(self, controller: Controller, message: msg.Message) -> None:
        self.count += 1
        if self.count in self.acts:
            self.acts[self.count](controller)


def entries(folder: Path, kind: type) -> list[Any]:
    return [entry for entry in read_journal(folder / "journal") if isinstance(entry, kind)]


def events(folder: Path, kind: type) -> list[Any]:
    return [entry.event for entry in entries(folder, Happened) if isinstance(entry.event, kind)]


def vanishes(controller: Controller, link: Link) -> None:
    """The host and all it ran."""
    says(controller, link, None)
    for host in controller.guests._hosts:
        if cast(Any, host.link) is link:
            for cell in host.cells:
                if (PeerKind.CELL, cell) in peers_of(controller).peers:
                    peers_of(controller).vanish(cell)


moments = st.integers(1, 400)


@settings(max_examples=40, deadline=None)
@given(
    visits=st.lists(
        st.tuples(moments, moments, st.integers(1, 2), st.booleans(), st.booleans()), min_size=1, max_size=3
    )
)
async def test_whenever_guests_come_and_go_the_run_takes_its_steps(
    visits: list[tuple[int, int, int, bool, bool]],
) -> None:
    acts: dict[int, list[Callable[[Controller], None]]] = {}
    for come, stay, cells, rollout_only, in_order in visits:
        link = Link()
        message = offer(cells, rollout_only=rollout_only)
        leave = msg.LeaveCells(30.0, "SIGTERM")
        acts.setdefault(come, []).append(lambda c, link=link, message=message: says(c, link, message))  # type: ignore[misc]
        end = (
            (lambda c, link=link, leave=leave: says(c, link, leave))
            if in_order
            else (lambda c, link=link: vanishes(c, link))
        )
        acts.setdefault(come + stay, []).append(end)
    with tempfile.TemporaryDirectory() as folder:
        script = Script({at: lambda c, all=all: [act(c) for act in all] for at, all in acts.items()})  # type: ignore[misc]
        controller = make_controller(Path(folder), small_run(STEPS), 1, script)
        assert await controller.run() is None
        steps = [entry.version for entry in entries(Path(folder), StepTaken)]
        assert steps == list(range(1, STEPS + 1))
        joined = [cell for entry in entries(Path(folder), GuestsJoined) for cell in entry.cells]
        assert joined == list(range(3, 3 + len(joined)))
        assert not controller.supervision._restarted_at, "a guest costs no restart"


async def run_with(folder: Path, acts: dict[int, Callable[[Controller], None]], epoch: int = 1) -> Controller:
    controller = make_controller(folder, small_run(STEPS), epoch, Script(acts))
    assert await controller.run() is None
    return controller


async def test_a_resumed_controller_gives_ids_that_no_guest_has_had(tmp_path: Path) -> None:
    def dies(controller: Controller) -> None:
        raise Interrupt

    first = make_controller(
        tmp_path, small_run(STEPS), 1, Script({30: lambda c: says(c, Link(), offer(2)), 200: dies})
    )
    with pytest.raises(Interrupt):
        await first.run()
    assert ids_of(first) == [3, 4]
    second = await run_with(tmp_path, {30: lambda c: says(c, Link(), offer())}, epoch=2)
    assert ids_of(second) == [5]
    kinds = {event.cell: event.kind for event in events(tmp_path, CellAdded)}
    satellite, own = CellKind.SATELLITE, CellKind.OWN
    assert kinds == {0: own, 1: own, 2: own, 3: satellite, 4: satellite, 5: satellite}


async def test_a_guest_that_dies_is_started_again_until_its_host_is_given_up(tmp_path: Path) -> None:
    link = Link()
    deaths = {at: lambda c: dies_with(c, -9) for at in range(60, 60 + 40 * (RESTARTS + 1), 40)}
    controller = await run_with(tmp_path, {20: lambda c: says(c, link, offer())} | deaths)
    lost = [event.cell for event in events(tmp_path, CellLost)]
    assert lost == [3] * (RESTARTS + 1) and ids_of(controller) == [] and gone_of(controller) == [3]
    assert link.said[0] == msg.Shutdown("none of its cells is left")


@pytest.mark.parametrize("code", [0, 2])
async def test_a_guest_whose_job_ends_it_or_that_lacks_something_is_given_up_at_once(
    tmp_path: Path, code: int
) -> None:
    """Exit code 2 of a cell of the run's own would end the run."""
    link = Link()
    acts = {20: lambda c: says(c, link, offer()), 60: lambda c: dies_with(c, code)}
    controller = await run_with(tmp_path, acts)
    assert [event.cell for event in events(tmp_path, CellLost)] == [3] and gone_of(controller) == [3]


async def test_a_guest_whose_node_is_lost_is_told_as_lost_with_the_node_and_started_elsewhere(
    tmp_path: Path,
) -> None:
    """srun, and so its host, says 0 of such an end, as of one in order."""
    link, told = Link(), list[tuple[str, str]]()

    def loses_its_node(controller: Controller) -> None:
        process = RemoteProcess("cell-3", ProcessSerial(1), lambda message: None)
        process.nodes, process.lost = ("n7",), ("n7",)
        peers_of(controller).peers[PeerKind.CELL, 3].handle = process
        controller.observer.fault = lambda who, what: told.append((who, what))  # type: ignore[method-assign]
        dies_with(controller, 0)

    controller = await run_with(tmp_path, {20: lambda c: says(c, link, offer()), 60: loses_its_node})
    assert told == [("cell-3", "lost with node n7")]
    assert [event.cell for event in events(tmp_path, CellLost)] == [3] and ids_of(controller) == [3]


@pytest.mark.parametrize("heard", [True, False])
async def test_a_host_whose_link_breaks_and_comes_back_gets_the_ids_it_had(
    tmp_path: Path, heard: bool
) -> None:
    """Whether or not the ends of its cells have been heard by then; another host gets others."""
    first, again, other = Link(), Link(), Link(pid=2)

    def flaps(controller: Controller) -> None:
        (vanishes if heard else lambda c, link: says(c, link, None))(controller, first)
        if heard:
            return
        says(controller, again, offer(2))
        for cell in (3, 4):
            peers_of(controller).vanish(cell)

    acts = {20: lambda c: says(c, first, offer(2)), 60: flaps, 140: lambda c: says(c, other, offer())}
    if heard:
        acts[100] = lambda c: says(c, again, offer(2))
    controller = await run_with(tmp_path, acts)
    assert [entry.cells for entry in entries(tmp_path, GuestsJoined)] == [(3, 4), (5,)]
    assert ids_of(controller) == [3, 4, 5]
    assert [host.cells for host in controller.guests._hosts] == [{3, 4}, {5}]


def dies_with(controller: Controller, code: int) -> None:
    peers = peers_of(controller)
    if (PeerKind.CELL, 3) in peers.peers and not peers.peers[PeerKind.CELL, 3].dead:
        peers.vanish(3, code)


async def test_a_run_that_is_over_takes_no_cells(tmp_path: Path) -> None:
    controller = await run_with(tmp_path, {})
    link = Link()
    controller.guests.said(cast(Any, link), offer())
    assert link.said == [msg.Shutdown("the run has no use for these cells")] and ids_of(controller) == []


class Training:
    """Guests of one host: cell 3 trains and owes a contribution, cell 4 serves, cell 5 has not said hello."""

    def __init__(self, folder: Path) -> None:
        self.controller = make_controller(folder, small_run(STEPS), 1, lambda controller, message: None)
        self.guests, self.link, self.now = self.controller.guests, Link(), 0.0
        self.sent: list[tuple[int, msg.Message]] = []
        self.killed: list[int] = []
        self.guests.clock = lambda: self.now
        self.owes = {3}
        self.guests.batches = cast(
            Any, SimpleNamespace(owes=lambda cell: cell in self.owes, flush_leaver=lambda cell: True)
        )
        self.guests.peers = cast(
            Any,
            SimpleNamespace(
                hosts={},
                send=lambda kind, index, message: self.sent.append((index, message)),
                kill=lambda kind, index: self.killed.append(index),
            ),
        )
        self.guests.said(cast(Any, self.link), offer(3))
        for cell, phase in ((3, Phase.TRAINING), (4, Phase.ROLLOUT)):
            self.controller.cells.cells[CellId(cell)].phase = phase
        self.guests.said(cast(Any, self.link), msg.LeaveCells(45.0, "USR2"))


def told(world: Training) -> list[int]:
    return [cell for cell, message in world.sent if isinstance(message, msg.Shutdown)]


async def test_a_leaving_guest_ends_once_its_calls_have_moved_and_its_contribution_is_added(
    tmp_path: Path,
) -> None:
    world = Training(tmp_path)
    assert told(world) == [] and world.killed == [5]
    cell = world.controller.cells.cells[CellId(4)]
    world.controller.cells.unrouted(msg.Unrouted(cell.id, 1, cell.route), False, 0, None, cast(Any, 0))
    world.guests.tick()
    assert told(world) == [4]
    world.owes.clear()
    world.guests.tick()
    world.guests.tick()
    assert told(world) == [4, 3]


async def test_a_guest_whose_contribution_is_not_wanted_in_time_ends_all_the_same(tmp_path: Path) -> None:
    world = Training(tmp_path)
    world.now = 41.0
    world.guests.tick()
    assert told(world) == [3, 4]


async def test_a_leaving_guest_gets_no_more_work(tmp_path: Path) -> None:
    """It still stands in training for the schedule until it has ended."""
    enrolled: list[tuple[int, bool]] = []

    def notes(controller: Controller) -> None:
        enrol = controller.batches.enrol

        def noted(cell: CellId) -> bool:
            enrolled.append((cell, controller.cells.cells[cell].departing))
            return enrol(cell)

        controller.batches.enrol = noted  # type: ignore[method-assign]
        says(controller, link, offer())

    link = Link()
    leave = {at: lambda c: leaves_if_training(c, link) for at in range(21, 400)}
    await run_with(tmp_path, {20: notes} | leave)
    assert 3 in {cell for cell, _ in enrolled}
    assert not any(departing for _, departing in enrolled)


def leaves_if_training(controller: Controller, link: Link) -> None:
    cell = controller.cells.cells.get(CellId(3))
    if cell is not None and cell.phase is Phase.TRAINING and not cell.departing:
        controller.guests.said(cast(Any, link), msg.LeaveCells(30.0, "SIGTERM"))


async def test_a_silent_host_is_lost_with_its_cells(tmp_path: Path) -> None:
    world = Training(tmp_path)
    world.link.silent = 25.0
    world.guests.tick()
    assert not world.link.abandoned
    world.link.silent = 31.0
    world.guests.tick()
    assert world.link.abandoned
