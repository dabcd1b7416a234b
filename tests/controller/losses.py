"""Runs in which a cell or the controller is lost at a named point, and the laws that whatever is left must obey.

A `Loss` says where (the nth time that a cell of this role passes the point) and who: the cell that stands there, the core,
another satellite, or the controller with all its cells. After it the run must come to its end by itself.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.journal.entries import AnyEntry, Happened, Outcome, StepTaken
from gyre_hpc.controller.journal.journal import read_journal
from gyre_hpc.schedule import protocol as p
from tests.controller.live_cells import CellPeers, Inline
from tests.controller.test_switch_gaps import LAST_OF_BATCH
from tests.controller.training_world import Point, Taken, World
from tests.controller.world import Interrupt, make_controller, nothing, small_run

PATIENCE_S = 240.0
"""Longest time of one controller: nothing in these runs takes time."""
STEPS, MEMBERS = 4, 4


class Victim(enum.StrEnum):
    """Who is lost, seen from the cell that stands at the point."""

    SELF = "self"
    CORE = "core"
    SATELLITE = "satellite"
    SERVERS = "servers"
    """All cells in rollout: training ones must give way."""
    CONTROLLER = "controller"


@dataclass(frozen=True)
class Loss:
    """The `nth` time (from 1) that a cell, the core or not, passes `what`; None of the two: any point, any cell."""

    victim: Victim
    what: str | None = None
    core: bool | None = None
    nth: int = 1

    def meets(self, point: Point) -> bool:
        return self.what in (None, point.what) and self.core in (None, point.core)


def burst_config(policy: str = "gyre", *, steps_per_burst: int = 2, checkpoint_every: int = 1) -> RunConfig:
    """Three cells, four steps. Under async three train all the time, and a fourth serves."""
    config = small_run(STEPS)
    if policy == "async":
        config.cluster.cells, config.schedule.training_cells = 4, 3
    config.schedule.policy, config.schedule.steps_per_burst = policy, steps_per_burst
    config.trainer.checkpoint_every = checkpoint_every
    config.cluster.restarts = 100
    return config


@dataclass
class Run:
    """One run with its losses, over as many controllers as it takes."""

    world: World
    config: RunConfig
    losses: list[Loss]
    struck: list[Point] = field(default_factory=list)
    slow: bool = False
    """The last execution of the first batch ends only when a cell is routed again after the first loss."""
    epochs: int = 0
    left: int = 0

    def strike(self, point: Point) -> None:
        """Called at every point: losses happen one after another, each counted from the one before."""
        if not self.losses or not self.losses[0].meets(point):
            return
        self.left -= 1
        if self.left:
            return
        loss = self.losses.pop(0)
        self.left = self.losses[0].nth if self.losses else 0
        self.struck.append(point)
        self._lose(loss.victim, point.cell)

    def _lose(self, victim: Victim, cell: int) -> None:
        world = self.world
        if victim is Victim.CONTROLLER:
            world.peers.interrupt()
            return
        for index in self._who(victim, cell):
            world.peers.vanish(index)

    def _who(self, victim: Victim, cell: int) -> list[int]:
        world = self.world
        live = [index for index, one in sorted(world.peers.live.items()) if not one.dead]
        if victim is Victim.SERVERS:
            rows = world.controller.cells.cells
            return [index for index in live if rows[index].phase is Phase.ROLLOUT]
        if victim is Victim.SATELLITE:
            return [index for index in live if index not in (cell, world.core)][:1]
        return [index for index in live if index == (cell if victim is Victim.SELF else world.core)]

    async def to_its_end(self) -> None:
        """Controller after controller."""
        asyncio.get_running_loop().set_default_executor(Inline())
        self.left = self.losses[0].nth if self.losses else 0
        self.world.strike = self.strike
        while not await self._one_controller():
            pass

    async def _one_controller(self) -> bool:
        """False when it died."""
        world, self.epochs = self.world, self.epochs + 1
        world.controller = make_controller(
            world.run, self.config, self.epochs, nothing, lambda watch: CellPeers(world, self.config, watch)
        )
        world.peers.services.slow = LAST_OF_BATCH if self.slow and self.epochs == 1 else None
        world.peers.may_release = lambda: bool(self.struck)
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await world.controller.run() is None
        except Interrupt:
            return False
        except TimeoutError as error:
            raise AssertionError(f"stuck after {self.struck}: {world.controller.driver.state}") from error
        finally:
            world.at_rest |= world.peers.services.at_rest
            world.peers.end()
        return True


async def run_with(
    folder: Path, config: RunConfig, *losses: Loss, apart: bool = True, slow: bool = False
) -> Run:
    """A whole run in which these losses happen, one after another."""
    run = Run(World(folder, apart), config, list(losses), slow=slow)
    await run.to_its_end()
    return run


# ---- laws -----------------------------------------------------------------------------------------------------------


def check_laws(run: Run) -> None:
    """What must hold of every run, whatever was lost in it."""
    entries = list(read_journal(run.world.run / "journal"))
    assert not run.world.wrong, run.world.wrong
    every_execution_ends_once(run, entries)
    versions_go_upward(entries)
    final_weights_are_the_counted_steps(run, entries)
    every_micro_step_is_trained_once(entries)
    executions_weigh_the_same(entries)
    if run.epochs == 1 and not events(entries, p.CoreRestored):
        assert not run.world.dropped, f"open gradients dropped: {run.world.dropped}"


def every_execution_ends_once(run: Run, entries: list[AnyEntry]) -> None:
    ids = [entry.outcome.execution for entry in entries if isinstance(entry, Outcome)]
    assert sorted(ids) == list(range(len(ids)))
    assert set(ids) == run.world.at_rest


def versions_go_upward(entries: list[AnyEntry]) -> None:
    versions = [step.version for step in taken(entries)]
    assert versions == list(range(1, len(versions) + 1))
    published = [event.version for event in events(entries, p.Published)]
    assert published == sorted(set(published))


def counted(entries: list[AnyEntry]) -> list[StepTaken]:
    """Steps that no restored core has undone."""
    steps: list[StepTaken] = []
    for entry in entries:
        if isinstance(entry, StepTaken):
            steps.append(entry)
        elif isinstance(entry, Happened) and isinstance(entry.event, p.CoreRestored):
            steps = [step for step in steps if step.version <= entry.event.version]
    return steps


def final_weights_are_the_counted_steps(run: Run, entries: list[AnyEntry]) -> None:
    """The journal's owner maps are what the optimizer was given, in that order: a replay makes the same weights."""
    steps = counted(entries)
    recorded = tuple(
        Taken(step.version, tuple(name for _, names in step.owners for name in names), step.executions)
        for step in steps
    )
    trained = run.world.versions[steps[-1].version]
    assert [(t.version, sorted(t.names), t.executions) for t in trained] == [
        (t.version, sorted(t.names), t.executions) for t in recorded
    ]
    assert len(steps) == STEPS


def every_micro_step_is_trained_once(entries: list[AnyEntry]) -> None:
    """A group is trained whole, in one step that counts, or not at all: its steps were undone, or it gave none."""
    whole = {event.group: event.micro_steps for event in events(entries, p.GroupReady)}
    trained: Counter[int] = Counter()
    for step in counted(entries):
        names = [name for _, own in step.owners for name in own]
        assert len(names) == len(set(names)), f"twice in version {step.version}: {sorted(names)}"
        groups = Counter(map(group_of, names))
        assert groups == {group: whole[group] for group in groups}, f"version {step.version}: {groups}"
        trained += Counter(groups.keys())
    assert set(trained.values()) == {1}, f"groups trained twice: {trained}"
    undone = {group_of(name) for step in taken(entries) for _, own in step.owners for name in own}
    given_up = {
        decision.group
        for entry in entries
        if isinstance(entry, Happened)
        for decision in entry.decisions
        if isinstance(decision, p.WriteOff)
    }
    left = {group for group, count in whole.items() if count} - set(trained) - undone - given_up
    assert not left, f"groups that were ready are neither trained nor undone: {left}"


def taken(entries: list[AnyEntry]) -> list[StepTaken]:
    return [entry for entry in entries if isinstance(entry, StepTaken)]


def executions_weigh_the_same(entries: list[AnyEntry]) -> None:
    """A step scales by the valid executions of its groups."""
    for step in counted(entries):
        groups = {group_of(name) for _, names in step.owners for name in names}
        assert step.executions == MEMBERS * len(groups)


def group_of(name: str) -> int:
    return int(name.partition(".")[0])


def events(entries: list[AnyEntry], kind: type[p.AnyEvent]) -> list[p.AnyEvent]:
    return [e.event for e in entries if isinstance(e, Happened) and isinstance(e.event, kind)]
