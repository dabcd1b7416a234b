"""How fast points are submitted, and how their ends are waited for: one question to Slurm for all jobs, every `poll_s`.

At most `max_jobs` jobs of the sweep are in the queue at a time. With `wait` the next point follows when one ends, and a
submission that the site refuses because too many jobs are queued (MaxSubmitJobs of an association or QOS) is tried again;
without, the rest is left for a later call.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from gyre_hpc.launch.job.state import ENDED, job_states
from gyre_hpc.sweep.manifest import Entry, Manifest
from gyre_hpc.sweep.results import FINISHED, NOT_SUBMITTED, standings

T = TypeVar("T")
TOO_MANY: Final = re.compile(r"MaxSubmit|job submit limit", re.IGNORECASE)
"""In sbatch's words: AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit, '(job submit limit, user's size ...)'."""


@dataclass(frozen=True)
class Pace:
    """`max_jobs` 0: no limit of ours."""

    max_jobs: int = 0
    wait: bool = False
    poll_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep

    def __str__(self) -> str:
        return f"hydra.launcher.max_jobs={self.max_jobs} jobs are queued"


def paced(
    ready: Sequence[T],
    manifest: Manifest,
    pace: Pace,
    submit: Callable[[T], Entry],
    tell: Callable[[T, Entry | None], None],
) -> None:
    """`submit` each in order as the pace allows, and `tell` of it; None: left for a later call."""
    left, queued = deque(ready), _queued(manifest) if pace.max_jobs else 0
    while left:
        if pace.max_jobs and queued >= pace.max_jobs:
            queued = _queued(manifest)
        if pace.max_jobs and queued >= pace.max_jobs:
            if not pace.wait:
                break
            pace.sleep(pace.poll_s)
            continue
        entry = submit(left[0])
        if pace.wait and entry.error and TOO_MANY.search(entry.error):
            pace.sleep(pace.poll_s)
            continue
        queued += entry.job is not None
        tell(left.popleft(), entry)
    for each in left:
        tell(each, None)


def _queued(manifest: Manifest) -> int:
    """Jobs of the sweep that Slurm says have not ended."""
    jobs = [job for entry in manifest.entries if (job := manifest.job_of(entry))]
    return sum(state not in ENDED for state in job_states(jobs).values())


def wait_for_all(manifest: Manifest, pace: Pace) -> None:
    """Return when every point that has a job has ended. A job that Slurm does not know is waited for."""
    ended: set[str] = set()
    while True:
        points = [point for point in standings(manifest) if point.job and point.state != NOT_SUBMITTED]
        ended |= {str(point.job) for point in points if point.state in ENDED or point.state == FINISHED}
        if all(point.job in ended for point in points):
            return
        pace.sleep(pace.poll_s)
