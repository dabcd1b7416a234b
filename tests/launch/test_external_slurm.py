"""Gateway and runner in a Slurm job of their own: executions outlive a requeue of the run's job, the run outlives theirs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.report import metrics as m
from tests.end_to_end.agreement import check_agreement
from tests.end_to_end.runs import SMALL, Plan, Run
from tests.end_to_end.test_adoption import attempts, check_undisturbed, open_calls
from tests.launch.cluster import running_cluster
from tests.launch.slurm_runs import completed, state, submitted, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("external", nodes=3, cpus=4, gpus=0, port=18020):
        yield


def begun(tmp_path: Path) -> tuple[Run, str, str]:
    """A run in the middle of its calls, its job, and the job of its services."""
    run = Run(tmp_path / "runs")
    plan = Plan(tmp_path / "plan", calls=3, max_tokens=24)
    own = ("cluster=devcluster", "cluster.runners=external", "engine.tokens_per_s=30", f"root={run.root}")
    job, folder = submitted(*SMALL, *own, *plan.overrides)
    until("calls under way", lambda: len(open_calls(run)) >= 2)
    return run, job, (folder / "services" / "job").read_text()


def test_executions_outlive_a_requeue_of_the_runs_job(cluster: None, tmp_path: Path) -> None:
    run, job, services = begun(tmp_path)
    subprocess.run(["scontrol", "requeue", job], check=True)
    until("the second start", lambda: (run.folder / "owner.2").exists())
    assert state(services) == "RUNNING"
    until("the end of the job", lambda: completed(job, run.folder))
    until("the end of the services", lambda: state(services) in ("COMPLETED", ""))
    check_undisturbed(run)


def test_a_run_outlives_the_job_of_its_services(cluster: None, tmp_path: Path) -> None:
    run, job, services = begun(tmp_path)
    subprocess.run(["scancel", services], check=True)
    until("the end of the job", lambda: completed(job, run.folder))
    again = run.layout.service_job.read_text()
    over = ("COMPLETED", "CANCELLED", "")  # cancelled: the run was done before they had come
    until("the end of the services", lambda: again != services and state(again) in over)
    assert any(f"as job {again}" in line.what for line in run.metrics(m.Fault) if line.who == "services")
    assert sorted(run.outcomes()) == list(range(16)) and max(attempts(run).values()) <= 3
    assert run.summary()["calls_lost"] == 0
    check_agreement(run)
