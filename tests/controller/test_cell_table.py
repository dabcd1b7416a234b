"""Role switches seen from the controller: who is asked what, in which order, and what the schedule hears."""

from __future__ import annotations

import pytest

from gyre_hpc.controller.cells.cell_rows import CellHooks
from gyre_hpc.controller.cells.cell_table import MAX_DOUBTS, CellTable
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.journal.entries import SwitchStep
from gyre_hpc.errors import IllegalTransition
from gyre_hpc.records import CellId, Version
from gyre_hpc.schedule import protocol as p
from gyre_hpc.transport import messages as msg

CELL = CellId(1)


def weights(version: int) -> msg.Manifest:
    return msg.Manifest(msg.RegionKind.WEIGHTS, "weights", version, "", "cell-0", "127.0.0.1:1", ())


class World:
    """One cell in a table whose messages are kept in one list, in order."""

    def __init__(self, *, known: bool = True, keeps_calls: bool = False) -> None:
        self.said: list[msg.Message] = []
        self.events: list[p.AnyEvent] = []
        self.heard: list[int] = []
        self.steps: list[SwitchStep] = []
        self.now = 0.0
        hooks = CellHooks(
            cell=lambda cell, message: self.said.append(message),
            gateway=self.said.append,
            feed=self.events.append,
            moved=lambda cell, previous: None,
            switched=lambda cell, message: self.heard.append(message.serial),
            clock=lambda: self.now,
            step=self.steps.append,
        )
        self.table = CellTable(hooks, drain_s=2.0, keeps_calls=keeps_calls)
        self.cell = self.table.add(CELL, 11, known=known)

    def phase(self) -> Phase:
        return self.cell.phase

    def last_event(self) -> p.AnyEvent:
        return self.events[-1]

    def switched(self, role: p.Role, version: int, serial: msg.Serial | None = None) -> None:
        """The answer to the newest switch, or to that of `serial`."""
        serial = self.cell.switch if serial is None else serial
        self.table.switched(CELL, msg.CellSwitched(role, Version(version), "http://engine", {}, serial))

    def unrouted(self, batch: int = 0, serial: msg.Serial | None = None) -> None:
        """The answer to the newest Unroute, or to that of `serial`."""
        serial = self.cell.route if serial is None else serial
        self.table.unrouted(msg.Unrouted(CELL, 0, serial), False, batch, weights(0), Version(0))

    def postponed(self, until: float = 9.0, serial: msg.Serial | None = None) -> None:
        """The cell could not pull the weights of the newest switch, or of that of `serial`."""
        serial = self.cell.switch if serial is None else serial
        self.table.postponed(CELL, msg.SwitchPostponed("reset by peer", serial), until)

    def doubt(self, until: float, serial: msg.Serial | None = None) -> bool:
        """The gateway could not use the engine of the newest Route, or of that of `serial`."""
        serial = self.cell.route if serial is None else serial
        return self.table.doubt_engine(msg.EngineFault(CELL, "no token", serial), until)

    def start(self, version: int = 0) -> None:
        self.table.hello(CELL)
        self.table.weights_available(weights(version))
        self.switched(p.Role.ROLLOUT, version)

    def into_training(self) -> None:
        self.table.to_training(CELL)
        self.unrouted()
        self.switched(p.Role.TRAINING, 0)


def test_a_cell_is_routed_before_the_schedule_counts_its_capacity() -> None:
    world = World()
    world.start()
    assert isinstance(world.said[-1], msg.Route)
    assert world.events == [p.CellReady(CELL, p.Role.ROLLOUT)]


def test_what_is_journaled_of_a_step_is_told_by_the_clock_of_the_table() -> None:
    world = World()
    world.start()
    world.steps.clear()
    world.now = 100.0
    world.into_training()
    world.now = 107.0
    world.table.to_rollout(CELL)
    world.table.lost(CELL)
    told = {item.step: (item.start, item.end, item.at) for item in world.steps}
    assert told[msg.StepName.JOIN] == (100.0, 100.0, 100.0)
    assert told[msg.StepName.LOST] == (107.0, 107.0, 107.0)


def test_calls_leave_before_the_engine_does() -> None:
    world = World()
    world.start()
    world.said.clear()
    world.table.to_training(CELL)
    assert [type(item) for item in world.said] == [msg.Unroute]
    world.unrouted(batch=4)
    assert world.said[-1] == msg.BecomeTrainer(4, False, weights(0), Version(0), world.cell.switch)
    world.switched(p.Role.TRAINING, 0)
    assert world.last_event() == p.CellReady(CELL, p.Role.TRAINING)


def test_a_returning_cell_is_routed_only_with_the_published_version() -> None:
    world = World()
    world.start()
    world.into_training()
    world.table.publish(weights(1))
    world.said.clear()
    world.table.to_rollout(CELL)
    assert world.said == [msg.BecomeEngine(Version(1), weights(1), world.cell.switch)]
    world.switched(p.Role.ROLLOUT, 1)
    route = msg.Route(CELL, "http://engine", 11, Version(1), world.cell.route, weights=weights(1).content)
    assert world.said[-1] == route
    assert world.last_event() == p.CellReady(CELL, p.Role.ROLLOUT)


def test_equal_weights_are_routed_by_one_name_wherever_they_lie_and_others_of_that_version_are_not() -> None:
    """A checkpoint that a resumed run restores has the pages of before; a version made again has none of them."""

    def published(owner: str, xxh3: str) -> str:
        world = World()
        world.table.hello(CELL)
        arrays = (msg.Fragment("w", (1,), "<f4", 4, xxh3),)
        where = msg.Manifest(
            msg.RegionKind.WEIGHTS, "policy", 7, "", owner, f"{owner}:1", arrays, f"/{owner}"
        )
        world.table.weights_available(where)
        world.switched(p.Role.ROLLOUT, 7)
        route = world.said[-1]
        assert isinstance(route, msg.Route) and route.version == 7
        return route.weights

    assert published("cell-0", "ab") == published("cell-2", "ab") != published("cell-0", "cd") != ""


def test_a_cell_overtaken_by_newer_weights_on_its_way_back_is_still_counted_in() -> None:
    world = World()
    world.start()
    world.into_training()
    world.table.publish(weights(1))
    world.table.to_rollout(CELL)
    world.table.weights = weights(2)
    world.events.clear()
    world.switched(p.Role.ROLLOUT, 1)
    assert world.phase() is Phase.LOADING and not world.events
    world.switched(p.Role.ROLLOUT, 2)
    assert world.events == [p.CellReady(CELL, p.Role.ROLLOUT)]


def test_an_engine_that_confirms_an_old_version_is_not_routed() -> None:
    world = World()
    world.table.hello(CELL)
    world.table.weights_available(weights(0))
    world.table.weights = weights(1)
    world.switched(p.Role.ROLLOUT, 0)
    assert world.phase() is Phase.LOADING and not world.events


def test_publication_is_complete_when_every_live_engine_confirmed() -> None:
    world = World()
    world.start()
    world.table.publish(weights(1))
    assert not world.table.publication_complete()
    world.unrouted()
    world.switched(p.Role.ROLLOUT, 1)
    assert world.table.publication_complete() and not world.table.publication_complete()


def test_a_cell_lost_during_publication_does_not_block_it() -> None:
    world = World()
    world.start()
    world.table.publish(weights(1))
    world.table.lost(CELL)
    assert world.table.publication_complete()
    assert world.last_event() == p.CellLost(CELL)


def test_an_engine_death_takes_capacity_at_once_and_gives_it_back() -> None:
    world = World()
    world.start()
    world.table.engine_down(CELL, "exit 9")
    assert world.last_event() == p.CellUnroutable(CELL, "exit 9")
    assert world.said[-1] == msg.Unroute(CELL, 0.0, "exit 9", world.cell.route, gone=True)
    world.switched(p.Role.ROLLOUT, 0)
    assert world.last_event() == p.CellRoutable(CELL)


def test_a_restarted_cell_is_added_afresh() -> None:
    world = World()
    world.start()
    world.table.lost(CELL)
    world.table.restarted(CELL)
    world.start()
    assert world.last_event() == p.CellAdded(CELL, 11)


def test_an_illegal_transition_names_both_phases() -> None:
    world = World()
    with pytest.raises(IllegalTransition, match="starting -> leaving"):
        world.table.to_training(CELL)


def test_an_engine_that_dies_around_a_publication_counts_again_once_it_serves() -> None:
    world = World()
    world.start()
    world.table.engine_died(CELL, "killed")
    world.table.publish(weights(1))
    world.switched(p.Role.ROLLOUT, 0)
    assert world.phase() is Phase.LOADING
    world.switched(p.Role.ROLLOUT, 1)
    assert world.events[-2:] == [p.CellUnroutable(CELL, "killed"), p.CellRoutable(CELL)]


def test_an_engine_that_dies_while_it_loads_new_weights_is_not_counted_until_it_serves_them() -> None:
    world = World()
    world.start()
    world.table.publish(weights(1))
    world.unrouted()
    world.table.engine_died(CELL, "killed")
    assert world.table.publication_complete()
    assert world.last_event() == p.CellUnroutable(CELL, "killed")
    world.switched(p.Role.ROLLOUT, 1)
    assert world.last_event() == p.CellReady(CELL, p.Role.ROLLOUT)


def test_a_doubted_engine_is_routed_again_unless_its_leader_calls_it_dead() -> None:
    world = World()
    world.start()
    assert world.doubt(1.0)
    world.table.end_doubts(now=2.0)
    assert world.phase() is Phase.ROLLOUT
    world.doubt(3.0)
    world.table.engine_died(CELL, "killed")
    world.table.end_doubts(now=4.0)
    assert world.phase() is Phase.DOWN


def test_a_doubted_engine_that_missed_a_publication_loads_before_it_serves() -> None:
    world = World()
    world.start()
    world.doubt(1.0)
    world.table.publish(weights(1))
    world.table.end_doubts(now=2.0)
    assert world.phase() is Phase.LOADING
    world.switched(p.Role.ROLLOUT, 1)
    assert world.last_event() == p.CellRoutable(CELL)


def test_an_engine_that_hangs_again_and_again_is_given_up() -> None:
    world = World()
    world.start()
    trusted = []
    for second in range(MAX_DOUBTS):
        trusted.append(world.doubt(second))
        world.table.end_doubts(now=second + 1)
    assert trusted == [True] * (MAX_DOUBTS - 1) + [False]


def test_no_two_commands_share_a_serial() -> None:
    world = World()
    world.start()
    world.into_training()
    world.table.to_rollout(CELL)
    world.switched(p.Role.ROLLOUT, 0)
    world.table.publish(weights(1))
    serials = [message.serial for message in world.said]  # type: ignore[attr-defined]
    assert serials == sorted(set(serials)) and len(serials) == 7


def test_calls_that_left_for_an_earlier_reason_say_nothing_of_those_that_leave_for_a_switch() -> None:
    world = World()
    world.start()
    world.table.engine_down(CELL, "exit 9")
    earlier = world.cell.route
    world.table.to_training(CELL)
    world.unrouted(serial=earlier)
    assert world.phase() is Phase.LEAVING
    world.unrouted()
    assert world.phase() is Phase.JOINING


def test_a_cell_that_was_recalled_is_not_taken_for_a_trainer() -> None:
    world = World()
    world.start()
    world.table.to_training(CELL)
    world.unrouted()
    joining = world.cell.switch
    world.table.to_rollout(CELL)
    world.events.clear()
    world.heard.clear()
    world.switched(p.Role.TRAINING, 0, serial=joining)
    assert world.phase() is Phase.RETURNING and not world.events and not world.heard
    world.switched(p.Role.ROLLOUT, 0)
    assert world.phase() is Phase.ROLLOUT


def test_an_engine_that_came_back_before_a_load_is_not_routed_in_the_middle_of_it() -> None:
    world = World()
    world.start()
    before = world.cell.switch
    world.doubt(until=1.0)
    world.table.publish(weights(1))
    world.table.end_doubts(now=2.0)
    world.said.clear()
    world.switched(p.Role.ROLLOUT, 1, serial=before)
    assert world.phase() is Phase.LOADING and not world.said


def test_an_engine_that_dies_before_it_loads_is_told_to_load_once() -> None:
    world = World()
    world.start()
    before = world.cell.switch
    world.table.publish(weights(1))
    world.unrouted()
    world.table.engine_died(CELL, "killed")
    world.said.clear()
    world.switched(p.Role.ROLLOUT, 0, serial=before)
    assert not world.said and world.phase() is Phase.DOWN
    world.switched(p.Role.ROLLOUT, 1)
    assert [type(item) for item in world.said] == [msg.Route]
    assert world.last_event() == p.CellReady(CELL, p.Role.ROLLOUT)


def test_a_fault_of_an_earlier_route_takes_no_capacity() -> None:
    world = World()
    world.start()
    earlier = world.cell.route
    world.table.publish(weights(1))
    world.unrouted()
    world.switched(p.Role.ROLLOUT, 1)
    for _ in range(MAX_DOUBTS + 1):
        assert world.doubt(until=1.0, serial=earlier)
    assert world.phase() is Phase.ROLLOUT


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.RETURNING, Phase.DOWN])
def test_a_cell_that_pulled_from_a_core_that_died_is_told_again_when_there_is_another(phase: Phase) -> None:
    world = World()
    world.start()
    if phase is Phase.RETURNING:
        world.into_training()
        world.table.publish(weights(1))
        world.table.to_rollout(CELL)
    else:
        world.table.publish(weights(1))
        world.unrouted()
    if phase is Phase.DOWN:
        world.table.engine_died(CELL, "killed")
    world.said.clear()
    world.postponed()
    assert world.phase() is phase and not world.said
    restored = msg.Manifest(msg.RegionKind.WEIGHTS, "weights", 1, "", "cell-2", "127.0.0.1:2", ())
    world.table.weights_available(restored)
    assert world.said == [msg.BecomeEngine(Version(1), restored, world.cell.switch)]
    assert not world.table.starved(now=99.0)
    world.switched(p.Role.ROLLOUT, 1)
    assert world.phase() is Phase.ROLLOUT and isinstance(world.said[-1], msg.Route)


def test_a_pull_that_failed_after_there_were_other_weights_is_made_again_at_once() -> None:
    world = World()
    world.start()
    world.table.publish(weights(1))
    world.unrouted()
    world.table.weights_available(weights(2))
    world.said.clear()
    world.postponed()
    assert world.said == [msg.BecomeEngine(Version(2), weights(2), world.cell.switch)]


def test_a_late_word_of_a_failed_pull_tells_a_cell_nothing_twice() -> None:
    world = World()
    world.start()
    before = world.cell.switch
    world.table.publish(weights(1))
    world.unrouted()
    world.postponed(serial=before)
    assert not world.table.starved(now=99.0)


def test_a_cell_that_cannot_pull_for_too_long_is_named_once() -> None:
    world = World()
    world.start()
    world.table.publish(weights(1))
    world.unrouted()
    world.postponed(until=9.0)
    assert not world.table.starved(now=9.0)
    assert world.table.starved(now=9.1) == [CELL] and not world.table.starved(now=9.2)


def test_a_cell_that_waits_for_weights_and_dies_waits_no_more() -> None:
    world = World()
    world.start()
    world.table.publish(weights(1))
    world.unrouted()
    world.postponed()
    world.table.lost(CELL)
    world.said.clear()
    world.table.weights_available(weights(2))
    assert not world.said and not world.table.starved(now=99.0)


def test_a_publication_that_keeps_calls_cuts_none_and_still_waits_for_every_engine() -> None:
    world = World(keeps_calls=True)
    world.start()
    world.said.clear()
    world.table.publish(weights(1))
    assert world.said == [msg.BecomeEngine(Version(1), weights(1), world.cell.switch)]
    assert world.phase() is Phase.RELOADING and not world.table.publication_complete()
    world.switched(p.Role.ROLLOUT, 1)
    assert world.phase() is Phase.ROLLOUT and isinstance(world.said[-1], msg.Route)
    assert world.table.publication_complete()


def test_a_cell_lost_while_it_reloads_under_its_calls_is_unrouted() -> None:
    world = World(keeps_calls=True)
    world.start()
    world.table.publish(weights(1))
    world.said.clear()
    world.table.lost(CELL)
    assert isinstance(world.said[-1], msg.Unroute) and world.said[-1].gone
    assert world.table.publication_complete()
