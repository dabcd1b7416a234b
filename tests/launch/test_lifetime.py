"""What Slurm prints about a job and a site, read. The texts are of Slurm 22.05.8."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_hpc.launch.commands import SlurmCommandFailed
from gyre_hpc.launch.job import lifetime
from gyre_hpc.launch.job.lifetime import Job, Site, parse_job, parse_site, seconds

RUNNING = (
    "JobId=8 JobName=x y=z UserId=root(0) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2"
    " RunTime=00:00:00 TimeLimit=00:10:00 StartTime=2026-11-30T01:21:17 EndTime=2026-11-30T01:31:17 Deadline=N/A"
    " PreemptEligibleTime=2026-11-30T01:21:17 PreemptTime=None Partition=preempt AllocNode:Sid=localhost:16035"
)
HET = (
    "JobId=12 HetJobId=11 HetJobOffset=1 JobState=RUNNING Partition=cells\n"
    "JobId=11 HetJobId=11 HetJobOffset=0 JobState=COMPLETING Requeue=0 EndTime=Unknown Partition=service QOS=long\n"
)
CONFIG = """Configuration data as of 2026-11-30T01:21:17
JobRequeue              = 1
KillWait                = 5 sec
PreemptMode             = GANG,REQUEUE
RequeueExit             = 75,100-102
RequeueExitHold         = (null)
"""


def at(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_a_running_job_has_an_end_and_no_preemption() -> None:
    job = parse_job(RUNNING)
    assert job == Job(
        state="RUNNING",
        start=at("2026-11-30T01:21:17"),
        end=at("2026-11-30T01:31:17"),
        restarts=2,
        partition="preempt",
    )


def test_a_preempted_job_has_the_time_of_it_and_an_earlier_end() -> None:
    text = RUNNING.replace("PreemptTime=None", "PreemptTime=2026-11-30T01:21:20").replace(
        "01:31:17", "01:21:25"
    )
    job = parse_job(text)
    assert (
        job is not None
        and job.preempted == at("2026-11-30T01:21:20")
        and job.end == at("2026-11-30T01:21:25")
    )


def test_a_job_killed_for_its_time_limit_is_told_from_one_that_ends_otherwise() -> None:
    ending = RUNNING.replace("JobState=RUNNING", "JobState=COMPLETING")
    killed, other = parse_job(ending.replace("Reason=None", "Reason=TimeLimit")), parse_job(ending)
    assert killed is not None and killed.timed_out and other is not None and not other.timed_out
    waiting = parse_job(RUNNING.replace("RUNNING Reason=None", "PENDING Reason=TimeLimit"))
    assert waiting is not None and not waiting.timed_out, "that reason keeps a job from starting"


def test_of_a_het_job_the_first_component_counts_wherever_it_is_printed() -> None:
    assert parse_job(HET) == Job("COMPLETING", requeue=False, partition="service", qos="long", het=True)


@pytest.mark.parametrize(
    "text", ["", "slurm_load_jobs error: Invalid job id specified", "No jobs in the system"]
)
def test_what_tells_of_no_job_is_unknown(text: str) -> None:
    assert parse_job(text) is None


def test_a_site_says_how_it_takes_jobs_back() -> None:
    assert parse_site(CONFIG) == Site((75, 100, 101, 102), True, 5.0, "REQUEUE")
    assert parse_site("RequeueExit = (null)\nJobRequeue = 0\n") == Site((), False, 30.0, "")
    assert parse_site("") == Site()


@pytest.mark.parametrize("text", ["Unknown", "N/A", "None", "", "UNLIMITED", "tomorrow"])
def test_a_time_that_is_not_known_is_none(text: str) -> None:
    assert seconds(text) is None


@given(st.text())
def test_no_text_breaks_the_readers(text: str) -> None:
    parse_job(text)
    parse_site(text)


def test_a_slurm_that_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*argv: str) -> str:
        raise SlurmCommandFailed("slurm_load_jobs error: Unable to contact slurm controller")

    monkeypatch.setattr(lifetime, "query", refuse)
    assert lifetime.ask_job("8") is None and lifetime.ask_site() == Site(told=False)


@pytest.mark.parametrize(
    ("qos", "partition", "mode"),
    [
        ("", "OFF", "REQUEUE"),
        ("", "CANCEL", "CANCEL"),
        ("requeue", "CANCEL", "REQUEUE"),
        ("cluster", "CANCEL", "CANCEL"),
    ],
)
def test_preemption_goes_by_qos_then_partition_then_site(
    monkeypatch: pytest.MonkeyPatch, qos: str, partition: str, mode: str
) -> None:
    answers = {"sacctmgr": qos, "scontrol": f"PartitionName=p PreemptMode={partition}"}
    monkeypatch.setattr(lifetime, "query", lambda *argv: answers[argv[0]])
    job = Job("RUNNING", partition="p", qos="long" if qos else "")
    assert lifetime.ask_preempt_mode(job, Site(preempt_mode="REQUEUE")) == mode
