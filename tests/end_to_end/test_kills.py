"""SIGKILL of every kind of process in the middle of its work: the run takes all its steps and loses no call."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from gyre_hpc.controller.journal.entries import AttemptOpened
from gyre_hpc.gateway.call_log import CallLogReader, call_logs
from gyre_hpc.gateway.logged_call import LoggedCall
from gyre_hpc.report import metrics as m
from gyre_hpc.schedule import protocol as p
from gyre_hpc.transport.links import read_secret
from gyre_hpc.transport.region_files import run_folder
from gyre_hpc.transport.regions import run_key
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.conftest import Start
from tests.end_to_end.runs import Plan, Run, all_gone

BUSY = ("engine.tokens_per_s=20", "cluster.restarts=20")
"""Calls last for seconds, so that there are always some under way."""


def recent_calls(run: Run) -> list[LoggedCall]:
    """Model calls of open executions, from the newest call log."""
    if not (logs := call_logs(run.layout)):
        return []
    reader = CallLogReader(logs[-1])
    reader.poll()
    return [call for calls in reader.executions.values() for call in calls.values()]


def until_calls(run: Run) -> None:
    run.until("calls under way", lambda: sum(call.finished is None for call in recent_calls(run)) >= 2)


def until_rerouted(run: Run) -> None:
    """A call that lost its engine has ended well elsewhere."""
    ended = run.until(
        "a re-routed call",
        lambda: [call.finished for call in recent_calls(run) if call.finished and call.finished.reroutes],
    )
    assert not any(call.lost for call in ended)


def kill(process: psutil.Process) -> None:
    process.kill()
    assert all_gone([process]) == []


def phase(run: Run, cell: int) -> str:
    """Where the cell is according to the metrics."""
    return next((line.role for line in reversed(run.metrics(m.RoleChange)) if line.cell == cell), "")


def check_finished(run: Run, executions: int) -> None:
    assert sorted(run.outcomes()) == list(range(executions))
    assert run.versions() == list(range(1, len(run.versions()) + 1))
    assert run.summary()["steps"] == 2 and run.summary()["calls_lost"] == 0
    check_agreement(run)


def test_the_death_of_an_engine_or_of_any_service_costs_time_alone(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", calls=3, max_tokens=24, hold=range(8))
    run = start(*plan.overrides, *BUSY)
    run.until("both cells to serve", lambda: {phase(run, 0), phase(run, 1)} == {"rollout"})
    plan.release(*range(4))
    until_calls(run)
    kill(run.engine(1))
    until_rerouted(run)
    run.until("the engine routed again", lambda: len(run.events(p.CellRoutable)) == 1)
    plan.release(*range(4, 7))
    until_calls(run)
    gateway = run.service("gateway.process")
    kill(gateway.children()[0])
    run.until("another gateway worker", lambda: gateway.children())
    until_calls(run)
    kill(run.service("executions.runner"))
    run.until("second attempts", lambda: any(entry.attempt == 2 for entry in run.entries(AttemptOpened)))
    until_calls(run)
    kill(run.service("gateway.process"))
    run.until("third attempts", lambda: any(entry.attempt == 3 for entry in run.entries(AttemptOpened)))
    kill(run.service("controller.processor"))
    plan.release()
    run.finish()
    check_finished(run, 16)
    assert {line.who for line in run.metrics(m.Fault)} >= {"cell-1", "runner", "gateway", "processor"}
    assert run.summary()["executions"] == {"completed": 16}


def test_the_death_of_a_training_satellite_or_core_returns_its_work(start: Start, tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan", hold=range(4, 8))
    run = start(*plan.overrides, "cluster.cells=3", "cluster.restarts=20", "trainer.tokens_per_s=40")
    join = run.until_metric(m.Join, lambda line: line.cell == 1)
    run.until("the satellite at work", lambda: phase(run, 1) == "training")
    kill(run.cell(1))
    run.until("the satellite counted out", lambda: run.events(p.CellLost))
    run.until("the satellite back", lambda: run.events(p.CellAdded))
    run.until("the core at work", lambda: phase(run, 0) == "training")
    kill(run.cell(0))
    run.until_metric(m.Restored)
    shutil.rmtree(run_folder(run_key(read_secret(run.layout))) / "processor")
    kill(run.service("controller.processor"))
    plan.release()
    run.finish()
    check_finished(run, 16)
    assert len(run.events(p.CellLost)) == 2, "a micro-step that lies nowhere ends no cell"
    assert join.batch == 0 and run.summary()["executions"] == {"completed": 16}
    assert {line.who for line in run.metrics(m.Fault)} >= {"cell-0", "cell-1", "processor"}
