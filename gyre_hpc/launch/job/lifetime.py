"""What Slurm knows about the life of one job: its end, its preemption, its state, and how the site takes jobs back.

Pure parsing of `scontrol` output over thin queries. A query that Slurm does not answer gives None or "": unknown, which is
never taken for an end (`job_state` tells the state of other jobs). Times are Unix seconds; Slurm prints them
in the local time zone of the node. Of a heterogeneous job the first component counts: it holds the batch process.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from typing import Final

from gyre_hpc.errors import GyreError
from gyre_hpc.launch.commands import query

log = logging.getLogger(__name__)

ENDING_STATES: Final = frozenset({"CANCELLED", "COMPLETING", "PENDING", "PREEMPTED", "REQUEUED", "TIMEOUT"})
"""States in which Slurm is already ending the processes of a job that ran (a requeued one counts as pending again)."""
_NEVER: Final = frozenset({"", "Unknown", "None", "N/A", "UNLIMITED"})
_FIELD: Final = re.compile(r"(?:^|\s)([A-Za-z:/]+)=(\S*)")


@dataclass(frozen=True)
class Job:
    """One job as `scontrol show job` tells it. `end` is the time limit's, or that of the grace time once preempted."""

    state: str
    start: float | None = None
    end: float | None = None
    preempted: float | None = None
    """When Slurm decided to preempt it; None while it did not."""
    restarts: int = 0
    requeue: bool = True
    """Whether Slurm may start the job again (JobRequeue of the site, --requeue or --no-requeue of the job)."""
    partition: str = ""
    qos: str = ""
    het: bool = False
    reason: str = ""
    """Why it is in its state, in Slurm's words; "" for "None"."""

    @property
    def timed_out(self) -> bool:
        """Whether it ends, or has ended, because its time limit is over."""
        return self.state == "TIMEOUT" or (self.state == "COMPLETING" and self.reason == "TimeLimit")


@dataclass(frozen=True)
class Site:
    """What `scontrol show config` says about taking jobs back."""

    requeue_exit: tuple[int, ...] = ()
    job_requeue: bool = True
    kill_wait_s: float = 30.0
    preempt_mode: str = ""
    told: bool = True
    """False: Slurm did not answer, these are its defaults."""


def parse_job(text: str) -> Job | None:
    """The first component of `scontrol show job --oneliner`; None if the text tells of no job."""
    jobs = [dict(_FIELD.findall(line)) for line in text.splitlines() if "JobId=" in line]
    first = next((job for job in jobs if job.get("HetJobOffset", "0") == "0"), None)
    if first is None or not first.get("JobState"):
        return None
    return Job(
        state=first["JobState"],
        start=seconds(first.get("StartTime", "")),
        end=seconds(first.get("EndTime", "")),
        preempted=seconds(first.get("PreemptTime", "")),
        restarts=int(first.get("Restarts") or 0),
        requeue=first.get("Requeue", "1") != "0",
        partition=first.get("Partition", ""),
        qos="" if first.get("QOS") in (None, "(null)", "N/A") else first["QOS"],
        het="HetJobId" in first,
        reason="" if first.get("Reason") in (None, "None") else first["Reason"],
    )


def parse_site(text: str) -> Site:
    """`scontrol show config`; what it does not name keeps Slurm's default."""
    lines = (line.partition("=") for line in text.splitlines())
    said = {key.strip(): value.strip() for key, _, value in lines}
    wait = re.match(r"\d+", said.get("KillWait", ""))
    return Site(
        requeue_exit=tuple(_exit_codes(said.get("RequeueExit", ""))),
        job_requeue=said.get("JobRequeue", "1") != "0",
        kill_wait_s=float(wait[0]) if wait else Site.kill_wait_s,
        preempt_mode=_mode(said.get("PreemptMode", "")),
    )


def seconds(text: str) -> float | None:
    """Slurm's "2026-01-31T12:00:00" (local time) as Unix seconds; None for a time it does not know."""
    if text in _NEVER:
        return None
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _exit_codes(text: str) -> list[int]:
    """RequeueExit: "75,100-102", or "(null)"."""
    codes: list[int] = []
    for word in text.split(","):
        first, _, last = word.strip().partition("-")
        if first.isdigit():
            codes += range(int(first), int(last if last.isdigit() else first) + 1)
    return codes


def _mode(text: str) -> str:
    """PreemptMode without GANG, which is about time slices."""
    return next((word for word in text.upper().split(",") if word not in ("GANG", "")), "")


def ask_job(job: str) -> Job | None:
    """What Slurm knows of a job now; None if it does not answer."""
    return parse_job(_ask("scontrol", "show", "job", "--oneliner", job))


def ask_site() -> Site:
    """The site's settings; Slurm's defaults, not `told`, where it does not answer."""
    text = _ask("scontrol", "show", "config")
    return parse_site(text) if text else Site(told=False)


def ask_preempt_mode(job: Job, site: Site) -> str:
    """What preemption does to the job: its QOS's mode, else its partition's, else the site's; "" if none is set."""
    of_qos = _mode(_ask("sacctmgr", "-nP", "show", "qos", job.qos, "format=PreemptMode")) if job.qos else ""
    if of_qos and of_qos not in ("CLUSTER", "OFF"):
        return of_qos
    shown = _ask("scontrol", "show", "partition", "--oneliner", job.partition) if job.partition else ""
    of_partition = _mode(dict(_FIELD.findall(shown)).get("PreemptMode", ""))
    return of_partition if of_partition not in ("", "OFF") else site.preempt_mode


def _ask(*command: str) -> str:
    """The answer, "" for none. A site without accounting or a busy controller is not an error here."""
    try:
        return query(*command)
    except GyreError as error:
        log.info("%s", error)
        return ""
