"""States of jobs on a real Slurm with accounting (slurmdbd), and on one that has none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_hpc.launch.job.state import ENDED, job_state, job_states
from tests.launch.cluster import reconfigure, running_cluster
from tests.launch.slurm_runs import until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(600)]

HET = """#!/bin/bash
#SBATCH --mem=64 --output=/dev/null
#SBATCH hetjob
#SBATCH --mem=64
sleep 600
"""


@pytest.fixture(scope="module")
def accounted() -> Iterator[None]:
    with running_cluster("accounts", nodes=2, cpus=2, gpus=0, port=18120, acct=True):
        yield


@pytest.fixture
def plain() -> Iterator[None]:
    with running_cluster("no-accounts", nodes=1, cpus=2, gpus=0, port=18124):
        yield


def sbatch(*words: str) -> str:
    command = ["sbatch", "--parsable", "--mem=64", "-o", "/dev/null", *words]
    return subprocess.check_output(command, text=True).strip()


def sacct(job: str, *flags: str) -> list[str]:
    command = ["sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j", job, *flags]
    return subprocess.check_output(command, text=True).splitlines()


def listed() -> list[str]:
    command = ["squeue", "-h", "--states=all", "-o", "%i"]
    return subprocess.check_output(command, text=True).split()


@pytest.mark.full
def test_ended_jobs_are_known_after_slurm_forgot_them(accounted: None, tmp_path: Path) -> None:
    (tmp_path / "het.sh").write_text(HET)
    good, bad, het = sbatch("--wrap=true"), sbatch("--wrap=exit 3"), sbatch(str(tmp_path / "het.sh"))
    until("the het job", lambda: job_state(het) == "RUNNING")
    subprocess.run(["scancel", het], check=True)
    expected = {good: "COMPLETED", bad: "FAILED", het: "CANCELLED"}
    until("every state", lambda: job_states(list(expected)) == expected)
    until("its record", lambda: f"{bad}|FAILED" in sacct(bad))  # records come late
    reconfigure("MinJobAge=.*", "MinJobAge=2")
    until("slurmctld to forget it", lambda: not listed(), 150.0)
    long = sbatch("--wrap=sleep 600")
    assert {line.partition("|")[0] for line in sacct(het)} == {f"{het}+0", f"{het}+1"}
    assert job_states([*expected, "4711"]) == expected
    until("the states from records", lambda: job_states([*expected, long]) == expected | {long: "RUNNING"})
    subprocess.run(["scancel", long], check=True)


@pytest.mark.full
def test_a_job_that_was_preempted_has_not_ended(accounted: None) -> None:
    """Accounting has a record of its first start as well, which says PREEMPTED."""
    low = sbatch("-p", "preempt", "-N2", "--exclusive", "--requeue", "--wrap=sleep 600")
    until("its start", lambda: job_state(low) == "RUNNING")
    high = sbatch("-p", "debug", "-N2", "--exclusive", "--wrap=sleep 12")
    seen = set()
    until("the preemption", lambda: seen.add(job_state(low)) or job_state(high) == "RUNNING")
    until("the requeue", lambda: seen.add(job_state(low)) or job_state(low) == "PENDING")
    assert not seen & ENDED
    assert f"{low}|PREEMPTED" in sacct(low, "-D")
    until("its start", lambda: job_state(low) == "RUNNING")
    subprocess.run(["scancel", low], check=True)
    until("its end", lambda: job_state(low) == "CANCELLED")


def test_without_accounting_a_job_is_known_while_slurm_keeps_it(plain: None) -> None:
    job = sbatch("--wrap=exit 3")
    until("its end", lambda: job_state(job) == "FAILED")
    assert job_state("4711") is None and job_states([job, "4711"]) == {job: "FAILED"}
