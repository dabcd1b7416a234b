"""What a controller expects of executions, and that it says so to a schedule that waits for it, also after a resume."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from gyre_hpc.config import RunConfig, ScheduleConfig, TasksConfig
from gyre_hpc.controller.context import RunContext
from gyre_hpc.controller.controller import Controller
from gyre_hpc.controller.journal.entries import Happened, Outcome
from gyre_hpc.controller.journal.forecasts import Forecasts
from gyre_hpc.controller.journal.history import read_history
from gyre_hpc.controller.journal.journal import Journal, read_journal
from gyre_hpc.controller.monitor.progress import Progress
from gyre_hpc.controller.peers.peers import Peers
from gyre_hpc.controller.train import schedule_settings
from gyre_hpc.layout import RunLayout
from gyre_hpc.records import ClosingReason, ExecutionId, GroupId
from gyre_hpc.report.metrics import MetricsWriter
from gyre_hpc.schedule import protocol as p
from gyre_hpc.schedule.machine import decide, initial_state
from gyre_hpc.transport.messages import ExecutionOutcome

CONFIG = RunConfig(
    schedule=ScheduleConfig(launch_order="longest_first", batch_groups=2), tasks=TasksConfig(heldout=0)
)


def outcome(
    query: str, wall_s: float, reason: ClosingReason = ClosingReason.COMPLETED, group: int | None = 0
) -> ExecutionOutcome:
    where = None if group is None else GroupId(group)
    return ExecutionOutcome(ExecutionId(0), 1, where, query, reason, wall_s, False, None)


def after(*outcomes: ExecutionOutcome) -> Forecasts:
    forecasts = Forecasts()
    for one in outcomes:
        forecasts.ended(one)
    return forecasts


def test_a_query_is_expected_to_take_the_mean_of_its_last_four() -> None:
    forecasts = after(*(outcome("toy:1", seconds) for seconds in (100.0, 1.0, 2.0, 3.0, 4.0)))
    assert forecasts.of("toy:1") == 2.5


def test_a_query_without_history_is_expected_to_take_what_queries_take() -> None:
    forecasts = after(outcome("toy:1", 10.0), outcome("toy:2", 30.0), outcome("toy:2", 50.0))
    assert forecasts.of("toy:3") == 25.0
    assert Forecasts().of("toy:3") == 0.0


def test_only_training_executions_that_ran_to_an_end_of_their_own_count() -> None:
    forecasts = after(
        outcome("toy:1", 5.0, ClosingReason.INFRASTRUCTURE),
        outcome("toy:1", 5.0, ClosingReason.CANCELLED_SURPLUS),
        outcome("toy:1", 5.0, group=None),
        outcome("toy:1", 0.0),
    )
    assert forecasts.of("toy:1") == 0.0


class Silent:
    """Peers that nobody hears."""

    def send(self, *_: object) -> None: ...

    def address(self, _: object) -> str:
        return ""


def controller(root: Path, epoch: int, config: RunConfig = CONFIG) -> Controller:
    layout = RunLayout(root)
    context = RunContext(
        config=config,
        layout=layout,
        secret=b"secret",
        epoch=epoch,
        journal=Journal(layout.journal, epoch),
        metrics=MetricsWriter(layout.metrics),
        progress=Progress(config.schedule.steps, Console(file=io.StringIO()), lambda: 0.0),
    )
    history = read_history(layout.journal, schedule_settings(config))
    return Controller(context, cast(Peers, Silent()), history)


def told(root: Path) -> list[Any]:
    """Events of the journal."""
    return [entry.event for entry in read_journal(RunLayout(root).journal) if isinstance(entry, Happened)]


def test_a_forecast_follows_each_dispatch(tmp_path: Path) -> None:
    control = controller(tmp_path, 1)
    control._begin()
    assert told(tmp_path) == [p.Started(), p.Forecast(((GroupId(0), 0.0), (GroupId(1), 0.0)))]
    assert len(control.driver.state.queued) == 16 and not control.driver.state.unforecast


def test_under_fifo_no_forecast_is_told(tmp_path: Path) -> None:
    config = RunConfig(schedule=ScheduleConfig(batch_groups=2), tasks=TasksConfig(heldout=0))
    controller(tmp_path, 1, config)._begin()
    assert told(tmp_path) == [p.Started()]


def test_a_controller_that_died_between_dispatch_and_forecast_tells_it_on_resume(tmp_path: Path) -> None:
    """The forecast rests on what the journal holds: the query of group 1 is known from an earlier outcome."""
    journal = Journal(RunLayout(tmp_path).journal, 1)
    state, decisions = decide(initial_state(schedule_settings(CONFIG)), p.Started())
    query = f"patchkit:{CONFIG.tasks.train_seed + 1}"
    journal.append(Outcome(0.0, outcome(query, 8.0, group=1)), Outcome(0.0, outcome("patchkit:7", 4.0)))
    journal.append(Happened(0.0, p.Started(), decisions))
    journal.close()
    assert state.unforecast == (0, 1)
    control = controller(tmp_path, 2)
    control._begin()
    expected = p.Forecast(((GroupId(0), 6.0), (GroupId(1), 8.0)))
    assert told(tmp_path) == [p.Started(), p.AllCellsLost(), expected]
    assert not control.driver.state.unforecast
