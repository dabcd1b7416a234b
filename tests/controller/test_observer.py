"""What people see of a run: metrics lines, device time by cause, and the terminal; all on a clock of the test's own."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from rich.console import Console

from gyre_hpc.config import ScheduleConfig
from gyre_hpc.controller.cells.cell_rows import Cell
from gyre_hpc.controller.cells.phases import Phase
from gyre_hpc.controller.executions.executions import Execution
from gyre_hpc.controller.journal.entries import Direction, StepTaken, SwitchStep
from gyre_hpc.controller.journal.evaluations import EvaluationPoint
from gyre_hpc.controller.monitor.idle import IdleMeter, role_and_cause
from gyre_hpc.controller.monitor.observer import Observer
from gyre_hpc.controller.monitor.progress import Progress
from gyre_hpc.controller.training.batches import BatchHooks, BatchRunner
from gyre_hpc.records import Assessment, CellId, ClosingReason, ExecutionId, GroupId, Version
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule.machine import initial_state
from gyre_hpc.schedule.protocol import Role
from gyre_hpc.schedule.settings import settings_from
from gyre_hpc.schedule.state import State
from gyre_hpc.transport.messages import (
    CellSwitched,
    ExecutionOutcome,
    ExecutionSealed,
    GroupProcessed,
    Serial,
    StepName,
)

Line = TypeVar("Line", bound=m.Metric)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


class Working(BatchRunner):
    """A batch in which these cells hold claims."""

    busy: frozenset[int] = frozenset()

    def works(self, cell: CellId) -> bool:
        return cell in self.busy


class Watch:
    """An observer with everything it writes."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.screen = Clock(), StringIO()
        self.path = folder / "metrics.jsonl"
        console = Console(file=self.screen, width=60, soft_wrap=True, highlight=False)
        self.progress = Progress(30, console, self.clock)
        self.observer = Observer(m.MetricsWriter(self.path), self.progress, self.clock, self.clock)
        nothing = BatchHooks(lambda *_: None, lambda *_: None, lambda *_: None, lambda *_: None)
        self.batch = Working(nothing)

    def lines(self, kind: type[Line]) -> list[Line]:
        return [line for line in m.read_metrics(self.path) if isinstance(line, kind)]

    def walk(self, cell: Cell, *phases: Phase, seconds: float = 1.0) -> None:
        """The cell enters each phase, `seconds` after the one before."""
        for phase in phases:
            previous, cell.phase = cell.phase, phase
            self.observer.moved(cell, previous)
            self.clock.t += seconds


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def state(**changes: object) -> State:
    settings = settings_from(ScheduleConfig(), (11, 11, 11), evaluate_first=True, evaluate_last=True)
    return msgspec.structs.replace(initial_state(settings), **changes)


def cell(number: int, phase: Phase = Phase.ROLLOUT) -> Cell:
    return Cell(CellId(number), 11, phase)


def switched(role: Role, **phases: float) -> CellSwitched:
    steps = {StepName(name): seconds for name, seconds in phases.items()}
    return CellSwitched(role, Version(1), "http://127.0.0.1:1", steps, Serial(0))


# ---- metrics lines ------------------------------------------------------------------------------------------------


def test_a_controller_says_that_it_has_taken_over(watch: Watch) -> None:
    watch.observer.opened("nixl")
    assert watch.lines(m.Metric) == [m.Opened(0.0, "nixl")]


def test_the_ledger_is_written_when_it_changes(watch: Watch) -> None:
    changed = state(dispatched=32, launched=30, terminated=5)
    for now in (state(), state(), changed, changed):
        watch.observer.water(now)
    assert [line.waterlevel for line in watch.lines(m.Water)] == [0, 27]
    assert watch.lines(m.Water)[-1].running == 25


def test_a_switch_lasts_from_the_decision_to_the_new_role(watch: Watch) -> None:
    one = cell(1)
    watch.walk(one, Phase.LEAVING, seconds=2.0)
    watch.walk(one, Phase.JOINING, seconds=3.0)
    watch.observer.switched(one, switched(Role.TRAINING, release=2.5, restore=0.25))
    watch.walk(one, Phase.TRAINING)
    (line,) = watch.lines(m.Switch)
    assert (line.cell, line.role, line.seconds) == (1, "training", 5.0)
    assert line.phases == {"drain": 2.0, "release": 2.5, "restore": 0.25}


def test_a_return_that_loads_twice_is_one_switch(watch: Watch) -> None:
    one = cell(1, Phase.TRAINING)
    watch.walk(one, Phase.RETURNING)
    watch.observer.switched(one, switched(Role.ROLLOUT, load=0.5))
    watch.walk(one, Phase.LOADING)
    watch.observer.switched(one, switched(Role.ROLLOUT, load=0.25))
    watch.walk(one, Phase.ROLLOUT)
    (line,) = watch.lines(m.Switch)
    assert (line.role, line.seconds, line.phases) == ("rollout", 2.0, {"load": 0.75})


def test_a_publication_lasts_until_every_engine_serves_it_and_counts_the_calls_it_cut(watch: Watch) -> None:
    def unrouted(direction: Direction, calls: int) -> None:
        at = (watch.clock.t, direction, CellId(1), 7, StepName.UNROUTE, 0.0, 0.0)
        watch.observer.heard(SwitchStep(*at, bytes=0, pages=0, calls=calls, outcome="done"))

    for cut, seconds in ((5, 2.0), (0, 3.0)):
        unrouted(Direction.TO_TRAINING, 9)
        watch.observer.publishing()
        unrouted(Direction.PUBLICATION, cut)
        unrouted(Direction.TO_TRAINING, 1)
        watch.clock.t += seconds
        watch.observer.published(Version(1))
    assert [(line.seconds, line.calls_cut) for line in watch.lines(m.Published)] == [(2.0, 5), (3.0, 0)]


def test_a_start_or_a_publication_is_no_role_switch(watch: Watch) -> None:
    one = cell(1, Phase.STARTING)
    watch.walk(one, Phase.IDLE, Phase.LOADING)
    watch.observer.switched(one, switched(Role.ROLLOUT, load=0.5))
    watch.walk(one, Phase.ROLLOUT, Phase.RELOADING, Phase.LOADING)
    watch.observer.switched(one, switched(Role.ROLLOUT, load=0.5))
    watch.walk(one, Phase.ROLLOUT)
    assert watch.lines(m.Switch) == []
    assert [line.role for line in watch.lines(m.RoleChange)].count("rollout") == 2


def test_a_cell_that_dies_while_it_switches_has_not_switched(watch: Watch) -> None:
    one = cell(1)
    watch.walk(one, Phase.LEAVING, Phase.JOINING, Phase.LOST, Phase.STARTING, Phase.IDLE, Phase.LOADING)
    watch.walk(one, Phase.ROLLOUT)
    assert watch.lines(m.Switch) == []


def test_a_step_is_scored_by_the_valid_rewards_of_its_groups(watch: Watch) -> None:
    watch.clock.t = 10.0
    watch.observer.batch_opened()
    watch.clock.t = 14.0
    owners = ((CellId(0), ("a", "b")), (CellId(1), ("c",)))
    record = StepTaken(0.0, 3, Version(4), 5, owners, {"grad_norm": 0.5}, (0, 2), 900)
    rewards = ((1.0, 0.0), (0.5, 0.5, 0.5))
    groups = [
        GroupProcessed(GroupId(i), len(each), each, (), 450, 4, 0, "") for i, each in enumerate(rewards)
    ]
    watch.observer.step(record, record.version, groups, 3)
    (line,) = watch.lines(m.Step)
    assert (line.version, line.score, line.groups, line.executions) == (4, 0.5, 2, 5)
    assert (line.micro_steps, line.tokens_trained, line.staleness, line.seconds) == (3, 900, (0, 2), 4.0)


@pytest.mark.parametrize(("clip_share", "told"), [(0.8, 0), (0.81, 1)])
def test_a_step_that_learned_next_to_nothing_is_told(watch: Watch, clip_share: float, told: int) -> None:
    owners = ((CellId(0), ("a",)),)
    record = StepTaken(0.0, 3, Version(4), 5, owners, {"clip_share": clip_share}, (0,), 900)
    watch.observer.step(record, 4, [], 1)
    faults = watch.lines(m.Fault)
    assert len(faults) == told and all(f.who == "step 4" and "81%" in f.what for f in faults)


def test_an_execution_without_a_record_of_calls_counts_none(watch: Watch) -> None:
    outcome = ExecutionOutcome(
        ExecutionId(3), 1, None, "patchkit:1", ClosingReason.INFRASTRUCTURE, 4.0, True, None
    )
    watch.observer.ended(Execution(ExecutionId(3), None, "patchkit:1", outcome=outcome))
    (line,) = watch.lines(m.Ended)
    assert (line.reason, line.score, line.group, line.calls, line.held_s) == (
        "infrastructure",
        None,
        None,
        0,
        0.0,
    )


def test_an_ended_execution_carries_the_gateways_account(watch: Watch) -> None:
    id, group = ExecutionId(4), GroupId(2)
    sealed = ExecutionSealed(id, 1, 9, 2, 0, 120, 700, 4000, 1.5, incomplete=False, budget_exhausted=False)
    assessment = Assessment(0.75, True, "3 of 4")
    outcome = ExecutionOutcome(id, 1, group, "q", ClosingReason.COMPLETED, 12.5, False, assessment)
    watch.observer.ended(Execution(id, group, "q", sealed=sealed, outcome=outcome))
    assert watch.lines(m.Ended) == [m.Ended(0.0, 4, 2, "completed", 0.75, 12.5, 9, 2, 0, 120, 700, 4000, 1.5)]


def test_an_evaluation_point_is_a_line_on_file_and_on_the_terminal(watch: Watch) -> None:
    point = EvaluationPoint(Version(5), 3, scores={ExecutionId(1): 0.5, ExecutionId(2): 1.0}, invalid=1)
    watch.observer.evaluated(point)
    assert watch.lines(m.Evaluated) == [m.Evaluated(0.0, 5, 0.75, 0.25, 2, 1)]
    assert "held-out score of version 5: 0.750 +- 0.250 (2 executions)" in watch.screen.getvalue()


# ---- device time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_a_role_and_only_rollout_and_training_can_be_busy(phase: Phase) -> None:
    role, cause = role_and_cause(phase, running=3, executing=9, training_busy=True)
    assert (cause == "") == (phase in (Phase.ROLLOUT, Phase.TRAINING))
    assert role in ("rollout", "training", "switching", "down")


@pytest.mark.parametrize(
    ("phase", "running", "executing", "busy", "expected"),
    [
        (Phase.ROLLOUT, 1, 1, False, ("rollout", "")),
        (Phase.ROLLOUT, 0, 1, False, ("rollout", "tools")),
        (Phase.ROLLOUT, 0, 0, False, ("rollout", "no_work")),
        (Phase.TRAINING, 0, 5, True, ("training", "")),
        (Phase.TRAINING, 0, 5, False, ("training", "no_micro_steps")),
        (Phase.JOINING, 0, 5, True, ("switching", "switching")),
        (Phase.LOADING, 0, 5, True, ("switching", "loading")),
        (Phase.IDLE, 0, 5, True, ("down", "starting")),
        (Phase.LOST, 0, 5, True, ("down", "down")),
    ],
)
def test_idleness_has_a_cause(
    phase: Phase, running: int, executing: int, busy: bool, expected: tuple[str, str]
) -> None:
    assert role_and_cause(phase, running=running, executing=executing, training_busy=busy) == expected


def test_the_meter_sums_by_cell_role_and_cause_and_forgets() -> None:
    meter = IdleMeter()
    meter.sample(CellId(1), "rollout", "", 1.0)
    meter.sample(CellId(0), "rollout", "tools", 0.5)
    meter.sample(CellId(1), "rollout", "", 2.0)
    assert meter.flush() == [(0, "rollout", "tools", 0.5), (1, "rollout", "", 3.0)]
    assert meter.flush() == []


def test_all_device_time_is_accounted_for(watch: Watch) -> None:
    cells = [cell(0, Phase.TRAINING), cell(1), cell(2)]
    for second in range(1, 8):
        watch.clock.t = float(second)
        watch.batch.busy = frozenset({0} if second <= 5 else ())
        now = state(dispatched=4, launched=4, terminated=0)
        watch.observer.sample(cells, watch.batch, now, {1: 2}, publishing=False)
    watch.observer.close()
    seconds = {(line.cell, line.cause): 0.0 for line in watch.lines(m.Busy)}
    for line in watch.lines(m.Busy):
        seconds[line.cell, line.cause] += line.seconds
        assert line.busy == (0.0 if line.cause else line.seconds)
    assert seconds == {(0, ""): 5.0, (0, "no_micro_steps"): 2.0, (1, ""): 7.0, (2, "tools"): 7.0}


def test_the_core_is_busy_while_it_publishes(watch: Watch) -> None:
    watch.clock.t = 3.0
    now = state()
    assert now.core is not None
    watch.observer.sample([cell(now.core, Phase.TRAINING)], watch.batch, now, {}, publishing=True)
    (line,) = watch.lines(m.Busy)
    assert (line.busy, line.cause) == (3.0, "")


# ---- terminal -----------------------------------------------------------------------------------------------------


def a_step(version: int, seconds: float = 20.0) -> m.Step:
    return m.Step(0.0, version, 0.4375, 4, 32, 16, 4100, (0,), {"grad_norm": 0.5}, seconds)


def test_a_step_is_one_line(watch: Watch) -> None:
    watch.progress.step(a_step(3), 3)
    assert watch.screen.getvalue() == (
        "step   3/30  score 0.438  executions 32  tokens 4100  micro-steps 16  grad norm 0.500  20.0 s\n"
    )


def test_a_step_after_undone_ones_is_counted_as_the_run_counts_and_its_version_told(watch: Watch) -> None:
    watch.progress.step(a_step(33), 30)
    assert watch.screen.getvalue().startswith("step  30/30  version 33  score 0.438  ")


def test_between_steps_a_line_every_few_seconds_tells_where_the_run_is(watch: Watch) -> None:
    cells = [cell(0, Phase.TRAINING), cell(1), cell(2)]
    for second in range(26):
        watch.clock.t = float(second)
        watch.progress.tick(state(dispatched=32, terminated=20), cells)
    lines = watch.screen.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("0:10  step 0/30  score -  waterlevel 12  evaluating 0")
    assert lines[0].endswith("cells rollout:2 training:1  left ?")


def test_the_time_left_follows_the_pace_of_the_steps_so_far(watch: Watch) -> None:
    watch.clock.t = 100.0
    watch.progress.step(a_step(1, seconds=20.0), 1)
    watch.clock.t = 120.0
    watch.progress.step(a_step(2, seconds=20.0), 2)
    watch.progress.tick(state(version=Version(2)), [])
    assert watch.screen.getvalue().splitlines()[-1].endswith("left ~9:20")


def test_what_others_say_is_shown_as_it_is(watch: Watch) -> None:
    watch.observer.fault("cell-1", "engine down: [red]OSError[/red] [Errno 28] " + "x" * 80)
    assert watch.screen.getvalue() == "cell-1: engine down: [red]OSError[/red] [Errno 28] " + "x" * 80 + "\n"
    assert watch.lines(m.Fault)[0].who == "cell-1"
