"""The end of a job before that of its run, on a real Slurm: time limits, preemption, cancellation, and going on after each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import PATIENCE_S, SCRIPT, reconfigure, running_cluster, squeue
from tests.launch.slurm_runs import SMALL, completed, state, steps_taken, submitted, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(1700)]

REPO = SCRIPT.parents[1]
RECORDER = Path(__file__).parent / "signal_recorder.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("ending", nodes=4, cpus=4, gpus=0, port=18200):
        yield


def said(run: Path, job: str) -> str:
    """What a person reads in the log of the job, over all its restarts."""
    log = run / "jobs" / f"{job}.log"
    return log.read_text() if log.exists() else ""


def record_signals(job: str, folder: Path) -> None:
    """A step of the job beside the run's own that writes down every signal it gets."""
    command = ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-c1", "--mem=64M", "--mpi=none"]
    subprocess.Popen([*command, sys.executable, str(RECORDER), str(folder)], start_new_session=True)


def preempt(job: str, seconds: int) -> None:
    """Another job of a better partition wants all of one of this job's nodes."""
    node = subprocess.check_output(["scontrol", "show", "hostnames", squeue(job, "%N")], text=True).split()[0]
    command = ["sbatch", "-N1", f"-w{node}", "--exclusive", "-pdebug", "--output=/dev/null", "-t5"]
    subprocess.run([*command, f"--wrap=sleep {seconds}"], check=True, capture_output=True)


def test_a_preempted_run_goes_on_to_its_end(cluster: None, tmp_path: Path) -> None:
    """The steps get SIGTERM and nobody dies of it: the controller leaves in order, within the grace time."""
    keys = ("cluster.job.partition=preempt", "schedule.steps=2")
    job, run = submitted(*SMALL, *keys, f"root={tmp_path}")
    until("a step", lambda: "step   1/2" in said(run, job))
    preempt(job, 1)
    until("the news of it", lambda: "the run ends early: preemption" in said(run, job), PATIENCE_S)
    until("the second start", lambda: (run / "owner.2").exists())
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 2
    first = (run / "logs" / "attempt-1" / "controller.log").read_text()
    assert "exited with" not in said(run, job).split("handed back")[0] and "shutdown" not in first


@pytest.mark.full
def test_time_limits_end_a_run_over_and_over_and_it_comes_to_its_end(cluster: None, tmp_path: Path) -> None:
    keys = ("cluster.job.time=00:02:00", "cluster.job.margin_s=45", "schedule.steps=60")
    job, run = submitted(*SMALL, *keys, f"root={tmp_path}")
    until("the job", lambda: state(job) == "RUNNING", PATIENCE_S)
    record_signals(job, tmp_path)
    until("the fourth time limit", lambda: (run / "owner.5").exists(), 1500)
    assert "SIGUSR2" not in (tmp_path / "signals").read_text()
    subprocess.run(["scontrol", "update", f"jobid={job}", "timelimit=60"], check=True)
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 60
    assert len(re.findall("handed back by exit code 75", said(run, job))) >= 4


@pytest.mark.full
def test_a_job_slurm_would_not_start_again_leaves_a_successor(cluster: None, tmp_path: Path) -> None:
    keys = ("cluster.job.time=01:00:00", "schedule.steps=4")
    job, run = submitted(*SMALL, *keys, "cluster.job.sbatch=[--no-requeue]", f"root={tmp_path}")
    until("a step", lambda: "step   1/4" in said(run, job))
    subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)
    until("the end of the job", lambda: state(job) == "FAILED")
    (successor,) = re.findall(r"handed back by job (\d+), which waits", said(run, job))
    until("the successor's start", lambda: (run / "owner.2").exists(), PATIENCE_S)
    until("the end of the successor", lambda: completed(successor, run))
    assert steps_taken(run) == 4


def by_hand(folder: Path, log: Path) -> str:
    """slurm/train.sbatch, with a size of its own on the command line; the job's id."""
    size = ["--nodes=2", "--cpus-per-task=4", "--mem=4G", f"--output={log}", f"--chdir={REPO}"]
    command = ["sbatch", "--parsable", *size, str(REPO / "slurm" / "train.sbatch"), *SMALL]
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
    }
    keys = [f"root={folder}", "schedule.steps=3"]
    return subprocess.check_output([*command, *keys], text=True, env=env, cwd=REPO).strip()


@pytest.mark.full
def test_a_job_from_a_script_by_hand_goes_on_with_the_run_it_began(cluster: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = by_hand(tmp_path / "runs", log)
    until("a step", lambda: log.exists() and "step   1/3" in log.read_text())
    subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)
    until("the end of the job", lambda: state(job) == "COMPLETED")
    (run,) = (tmp_path / "runs").iterdir()
    assert steps_taken(run) == 3 and (run / "owner.2").exists()


@pytest.mark.full
def test_a_site_that_starts_no_job_again_gets_a_successor_of_the_same_size(
    cluster: None, tmp_path: Path
) -> None:
    """Of a script by hand: what was given on the command line of sbatch is part of the job, not of its script."""
    reconfigure("JobRequeue=1", "JobRequeue=0")
    log = tmp_path / "log"
    job = by_hand(tmp_path / "runs", log)
    until("a step", lambda: log.exists() and "step   1/3" in log.read_text())
    subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)
    until("the end of the job", lambda: state(job) == "FAILED")
    (successor,) = re.findall(r"handed back by job (\d+), which waits", log.read_text())
    until("the end of the successor", lambda: state(successor) == "COMPLETED")
    (run,) = (tmp_path / "runs").iterdir()
    assert steps_taken(run) == 3 and (run / "owner.2").exists()
    reconfigure("JobRequeue=0", "JobRequeue=1")


@pytest.mark.full
def test_a_heterogeneous_job_is_handed_back_by_scontrol(cluster: None, tmp_path: Path) -> None:
    """Both components start again, and the run goes on to its end."""
    job, run = submitted(*SMALL, f"root={tmp_path}", "cluster.layout=het", "schedule.steps=3")
    until("a step", lambda: "step   1/3" in said(run, job))
    subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)
    until("the end of the job", lambda: completed(job, run))
    assert "handed back by scontrol requeue" in said(run, job)
    assert steps_taken(run) == 3 and (run / "owner.2").exists()


@pytest.mark.full
def test_what_a_person_ends_is_not_started_again(cluster: None, tmp_path: Path) -> None:
    job, run = submitted(*SMALL, "schedule.steps=50", "trainer.checkpoint_every=1", f"root={tmp_path}")
    until("two steps", lambda: "step   2/50" in said(run, job))
    subprocess.run(["scancel", job], check=True)
    until("the end of the job", lambda: state(job) == "CANCELLED", PATIENCE_S)
    assert "the run ends early: killed" in said(run, job) and not (run / "owner.2").exists()
    assert sorted((run / "checkpoints").glob("v*"))
