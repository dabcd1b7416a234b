"""States of several jobs at once, from squeue and for the rest from sacct. A job that neither knows is not in the answer.

Of a heterogeneous job only the first component counts: it holds the batch process. sacct lists it as N+0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from gyre_hpc.controller.owner import TERMINAL_STATES
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.commands import query

log = logging.getLogger(__name__)

FAILED: Final = TERMINAL_STATES - {"COMPLETED"}


def job_states(jobs: Sequence[str]) -> dict[str, str]:
    """State of each of `jobs` that Slurm knows, by job id."""
    known: dict[str, str] = {}
    for command in (
        ("squeue", "-h", "--states=all", "-o", "%i|%T", "-j"),
        ("sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j"),
    ):
        asked = [job for job in jobs if job not in known]
        if asked:
            known |= _asked(command, asked)
    return known


def _asked(command: Sequence[str], jobs: Sequence[str]) -> dict[str, str]:
    try:
        lines = query(*command, ",".join(jobs)).splitlines()
    except GyreError as error:  # no accounting, or every job is forgotten: proves nothing
        log.info("%s", error)
        return {}
    return {job: state for job, state in map(read_state, lines) if job in jobs}


def read_state(line: str) -> tuple[str, str]:
    """("59", "CANCELLED") of "59+0|CANCELLED by 1000"; other components keep their offset."""
    job, _, state = line.partition("|")
    return job.strip().removesuffix("+0"), (state.split() or [""])[0].rstrip("+")
