"""What is the state of this job: the one place that answers. A state that is not known is never an end.

squeue first: slurmctld keeps every job until minutes after its end (MinJobAge), also one that is requeued and waits. For
jobs it has forgotten sacct is asked, whose newest record of a job counts; a record comes late or never, and where squeue
does not answer at all none is believed, because the job may have been requeued since. Of a heterogeneous job only the first
component counts: it holds the batch process, and both commands list it as N+0. Called from login nodes and from jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from gyre_hpc.errors import GyreError
from gyre_hpc.launch.commands import SlurmCommandFailed, query

log = logging.getLogger(__name__)

ENDED: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)
"""States after which the job does not run again (squeue manual, JOB STATE CODES)."""
FAILED: Final = ENDED - {"COMPLETED"}
FORGOTTEN: Final = "Invalid job id"
"""squeue, asked for one job only, of a job slurmctld does not know."""


def job_state(job: str) -> str | None:
    """Slurm's word for the state of this job (RUNNING, CANCELLED, ...); None where Slurm does not know it."""
    return job_states([job]).get(job)


def job_states(jobs: Sequence[str]) -> dict[str, str]:
    """State of each of `jobs` that Slurm knows, by job id; one question for all."""
    if not jobs:
        return {}
    listed = _squeue(jobs)
    if listed is None:
        return {}
    return listed | _sacct([job for job in jobs if job not in listed])


def gone(jobs: Sequence[str]) -> frozenset[str]:
    """Those of `jobs` that Slurm says have ended, or that it has forgotten; none where it does not answer."""
    listed = _squeue(jobs) if jobs else None
    if listed is None:
        return frozenset()
    return frozenset(job for job in jobs if job not in listed or listed[job] in ENDED)


def _squeue(jobs: Sequence[str]) -> dict[str, str] | None:
    """None where slurmctld did not answer."""
    try:
        lines = query("squeue", "-h", "--states=all", "-o", "%i|%T", "-j", ",".join(jobs)).splitlines()
    except SlurmCommandFailed as error:
        if FORGOTTEN in error.message:
            return {}
        log.warning("%s", error)
        return None
    except GyreError as error:
        log.info("%s", error)
        return None
    return _states(lines, jobs)


def _sacct(jobs: Sequence[str]) -> dict[str, str]:
    if not jobs:
        return {}
    try:
        lines = query("sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j", ",".join(jobs)).splitlines()
    except GyreError as error:  # a site without accounting
        log.info("%s", error)
        return {}
    return _states(lines, jobs)


def _states(lines: Iterable[str], jobs: Sequence[str]) -> dict[str, str]:
    return {job: state for job, state in map(read_state, lines) if job in jobs and state}


def read_state(line: str) -> tuple[str, str]:
    """("59", "CANCELLED") of "59+0|CANCELLED by 1000"; other components keep their offset."""
    job, _, state = line.partition("|")
    return job.strip().removesuffix("+0"), (state.split() or [""])[0].rstrip("+")
