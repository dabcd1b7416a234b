"""Why a run ends before its last step, until when, and how its job is handed back (pure).

A controller hears of an end by a signal, by a peer that got SIGTERM, or by its own clock. What it means is asked of Slurm:

    SIGUSR2 or the clock            walltime: the time limit is near; hand back. Preempted if Slurm says so: some sites send
                                    the job's own signal then (PreemptParameters=send_user_signal)
    SIGTERM in the steps            preempted if Slurm says so (hand back), else that step's business alone
    SIGTERM, SIGINT in the batch    killed if Slurm is already ending the job (Slurm requeues what it wants to requeue),
                                    timed out if that is for its time limit (Slurm never requeues it: hand back),
                                    else asked by a person: checkpoint and end, nothing is handed back

A run that leaves may hear of a sooner end: a preemption during the drain, Slurm's kill during either (`revised`).
Handing back: an exit code of the site's RequeueExit, else `scontrol requeue`; a job that Slurm may not or would not start
again (Requeue=0, preemption that cancels) leaves a successor that waits for its end. The exit code is never 0: Slurm takes
that for the end of the run, also within the grace time of a preemption (measured, 22.05.8).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final

from gyre_hpc.launch.job.lifetime import ENDING_STATES, Job, Site

LEAVE_S: Final = 15.0
"""Seconds that remain after the checkpoint for shards, the ends of all processes, and handing back."""
SAVE_LEAST_S: Final = 5.0
"""A checkpoint is given this long even if all measured ones were shorter."""


class Cause(enum.StrEnum):
    """Why a run ends early."""

    WALLTIME = "walltime"
    PREEMPTION = "preemption"
    KILLED = "killed"
    """Slurm is ending the job: scancel, requeue, the end of a grace time."""
    TIMED_OUT = "timed_out"
    """Slurm is ending the job for its time limit, and would not start it again."""
    ASKED = "asked"
    """A person: Ctrl-C, SIGTERM to the batch process."""
    NOTHING_FITS = "nothing_fits"
    """What is left does not fit into this job."""

    @property
    def hands_back(self) -> bool:
        """Whether the run goes on in another job by itself."""
        return self not in (Cause.KILLED, Cause.ASKED)


class How(enum.StrEnum):
    """How a job is handed back."""

    EXIT = "exit"
    SCONTROL = "scontrol"
    SUCCESSOR = "successor"
    NOT = "not"
    """The run waits for `gyre submit resume=RUN`."""


@dataclass(frozen=True)
class Ending:
    """The run ends. `signal` names the exit code (128 + N); `end` is when Slurm kills the job (Unix seconds), if it does."""

    cause: Cause
    signal: str
    end: float | None = None

    def __str__(self) -> str:
        return self.signal if self.cause is Cause.ASKED else f"{self.cause} ({self.signal})"


def judge_signal(signal: str, job: Job | None, now: float, kill_wait_s: float, mode: str = "") -> Ending:
    """What a signal to the batch process means, heard at `now`. `mode`: what preemption does to the job.

    `job` None: Slurm did not say. Whoever sent it, there is no more time than Slurm would leave then.
    """
    if job is not None and job.state in ENDING_STATES and signal != "SIGUSR2":
        return _slurm_ends(job, now + kill_wait_s, mode)
    if signal == "SIGUSR2":
        preempted = job is not None and job.preempted is not None
        return Ending(Cause.PREEMPTION if preempted else Cause.WALLTIME, signal, job.end if job else None)
    return Ending(Cause.ASKED, signal, now + kill_wait_s if job is None else None)


def judge_step(job: Job | None, now: float, kill_wait_s: float, mode: str = "") -> Ending | None:
    """What SIGTERM in a step means; None: nothing for the run, somebody ends that step."""
    if job is None:
        return None
    if job.state in ENDING_STATES:
        return _slurm_ends(job, now + kill_wait_s, mode)
    if job.preempted is not None:
        return Ending(Cause.PREEMPTION, "SIGTERM", job.end)
    return None


def _slurm_ends(job: Job, end: float, mode: str) -> Ending:
    """Slurm kills the job's processes at `end`; what it does not start again by itself is still ours to hand back."""
    if job.timed_out:
        return Ending(Cause.TIMED_OUT, "SIGTERM", end)
    if job.preempted is not None and mode == "CANCEL":
        return Ending(Cause.PREEMPTION, "SIGTERM", end)
    return Ending(Cause.KILLED, "SIGTERM", end)


def revised(earlier: Ending | None, heard: Ending) -> Ending:
    """Which of two endings counts: the first, unless Slurm leaves less time than that. A person's end is not handed back."""
    if earlier is None:
        return heard
    sooner = heard.end is not None and (earlier.end is None or heard.end < earlier.end)
    if heard.cause is Cause.KILLED:
        return heard if sooner or earlier.cause is not Cause.KILLED else earlier
    if heard.cause not in (Cause.PREEMPTION, Cause.TIMED_OUT, Cause.ASKED) or earlier.cause is Cause.KILLED:
        return earlier
    if Cause.ASKED in (earlier.cause, heard.cause):
        return replace(earlier, end=heard.end) if sooner else earlier
    late = heard.cause is Cause.TIMED_OUT
    return heard if sooner or late else earlier


def save_s(checkpoint_s: float, safety: float) -> float:
    """Seconds a checkpoint may take, given the longest measured one."""
    return max(SAVE_LEAST_S, safety * checkpoint_s)


def leave_at(ending: Ending, checkpoint_s: float, safety: float) -> float | None:
    """When the checkpoint must begin (Unix seconds): until then what is under way may finish. None: at once."""
    if ending.end is None or ending.cause not in (Cause.WALLTIME, Cause.PREEMPTION):
        return None
    return ending.end - save_s(checkpoint_s, safety) - LEAVE_S


def how(by: str, requeue: bool, cause: Cause, job: Job | None, site: Site, preempt_mode: str) -> How:
    """The way back for `cluster.job.requeue_by=by`. `requeue` is `cluster.job.requeue`."""
    if not requeue or not cause.hands_back:
        return How.NOT
    if cause is Cause.TIMED_OUT:
        return How.SUCCESSOR
    if by != "auto":
        return How(by)
    refused = job is not None and not job.requeue
    cancels = cause is Cause.PREEMPTION and preempt_mode == "CANCEL"
    if refused or cancels:
        return How.SUCCESSOR
    if site.requeue_exit and not (job is not None and job.het):
        return How.EXIT
    return How.SCONTROL
