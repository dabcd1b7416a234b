"""When and why this controller leaves before its run is done, and what happens to its job then.

Asks Slurm (in threads, never blocking the loop) what a signal means, keeps the job's end by its own clock, permits launches
by the time that is left, and hands the job back once everything else has ended. `ending` is None until the run ends early;
it is set once, unless Slurm leaves less time than that: it may preempt a job that drains, or begin to kill it. On one machine a signal is a person's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from gyre_hpc.config import RunConfig
from gyre_hpc.controller.ending.ending import (
    Cause,
    Ending,
    How,
    how,
    judge_signal,
    judge_step,
    leave_at,
    revised,
)
from gyre_hpc.controller.executions.walltime import HOLD, RUN, Durations, Permit, permit
from gyre_hpc.errors import ConfigError, GyreError, HandedBack, NoProgress
from gyre_hpc.launch.commands import SlurmCommandFailed, query
from gyre_hpc.launch.identity import job_id
from gyre_hpc.launch.job import lifetime
from gyre_hpc.launch.job.lifetime import ENDING_STATES, Job, Site
from gyre_hpc.launch.job.margin import SAFETY, JobRecord, needed_s, read_record, write_record
from gyre_hpc.launch.job.successor import submit_successor
from gyre_hpc.launch.nodes.bad_nodes import keep_bad_nodes_from
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)

REFRESH_S: Final = 60.0
"""Seconds between two looks at the job's end: a person may move the time limit."""
LOOK_AGAIN_S: Final = 2.0
"""Seconds after which Slurm is asked again about a SIGTERM it had no reason for, or did not answer about."""
LOOKS: Final = 10
CHECKPOINT_GRACE_S: Final = 30.0
"""Longest wait for a checkpoint where nothing else bounds it and none was measured."""
SHUTDOWN_GRACE_S: Final = 20.0
PERSIST_S: Final = 120.0
"""Longest time for handing back while Slurm does not answer: what a restart of slurmctld takes, or its back-up's taking over."""
AGAIN_S: Final = 5.0


class Departure:
    """One controller's. `tell` is for a person to read."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cluster, self._layout, self._tell, self._clock = config.cluster, layout, tell, clock
        self._pause = pause
        self._overall_s = config.harness.overall_timeout_s
        self._id = job_id() if config.cluster.kind == "slurm" else ""
        self._job: Job | None = None
        self._site = Site(told=False)
        self._asked_at = clock()
        self._first_asked_at: float | None = None
        """When an execution could start first: what cells take to come up is no time of any job."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._step_judged: asyncio.Task[None] | None = None
        self._early_told = False
        self._preempt_mode = ""
        self._successor = ""
        self.record = read_record(layout)
        self.durations = Durations()
        self.progressed = False
        """Whether this controller has taken a step or recorded an outcome."""
        self.ending: Ending | None = None

    async def learn(self) -> None:
        """Ask Slurm about job and site. Raises ConfigError where the site cannot do what `requeue_by` says."""
        if not self._id:
            return
        await self._refresh()
        if self._cluster.job.requeue_by == "exit" and self._site.told and not self._site.requeue_exit:
            raise ConfigError(
                "cluster.job.requeue_by=exit: this site has no RequeueExit (scontrol show config)",
                fix="set cluster.job.requeue_by=auto",
            )

    # ---- what is heard -------------------------------------------------------------------------------------------

    @property
    def judging(self) -> bool:
        """Whether a signal is being looked into: nothing is restarted meanwhile."""
        return bool(self._tasks)

    def signalled(self, name: str) -> None:
        """A signal to this process."""
        if not self._id:
            self._leave(Ending(Cause.ASKED, name))
        elif name == "SIGUSR2":  # that one may not wait for Slurm's answer
            self._leave(judge_signal(name, self._job, self._clock(), self._site.kill_wait_s))
        if self._id:
            self._spawn(self._judge_signal(name))

    def asked_to_end(self, peer: str) -> None:
        """SIGTERM came to a peer, which goes on. A preemption tells all of them: one look at a time."""
        if self._id and (self._step_judged is None or self._step_judged.done()):
            self._step_judged = self._spawn(self._judge_step(peer))

    def nothing_fits(self) -> None:
        """All that is left is held for the next job."""
        self._leave(Ending(Cause.NOTHING_FITS, "SIGUSR2"))

    def tick(self) -> None:
        """To be called a few times a second: the job's end by our own clock."""
        now = self._clock()
        if not self._id or self.ending is not None:
            return
        if now - self._asked_at >= REFRESH_S:
            self._asked_at = now
            self._spawn(self._refresh())
        left = self.left_s()
        if left is not None and left <= 0:
            self._leave(Ending(Cause.WALLTIME, "SIGUSR2", self._job.end if self._job else None))

    async def _judge_signal(self, name: str) -> None:
        heard_at = self._clock()  # Slurm may take its time to answer, and goes on counting
        job = await asyncio.to_thread(lifetime.ask_job, self._id)
        if job is not None or name != "SIGUSR2":
            self._leave(judge_signal(name, job, heard_at, self._site.kill_wait_s, self._preempt_mode))

    async def _judge_step(self, peer: str) -> None:
        job: Job | None = None
        heard_at = self._clock()
        for look in range(LOOKS):
            job = await asyncio.to_thread(lifetime.ask_job, self._id)
            ending = judge_step(job, heard_at, self._site.kill_wait_s, self._preempt_mode)
            if ending is not None:
                self._leave(ending)
                return
            if look > 0 and job is not None:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        if self.ending is not None:
            return
        state = job.state if job is not None else "unknown"
        self._tell(f"{peer}: SIGTERM, but job {self._id} is {state} and not preempted: the run goes on")

    async def _refresh(self) -> None:
        self._job = await asyncio.to_thread(lifetime.ask_job, self._id) or self._job
        if self._site.told:
            return
        self._site = await asyncio.to_thread(lifetime.ask_site)
        if self._job is not None:
            self._preempt_mode = await asyncio.to_thread(lifetime.ask_preempt_mode, self._job, self._site)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _leave(self, ending: Ending) -> None:
        ending, earlier = revised(self.ending, ending), self.ending
        if ending == earlier:
            return
        self.ending = ending
        until = "" if ending.end is None else f", {max(0.0, ending.end - self._clock()):.0f} s are left"
        self._tell(f"the run ends early: {ending}{until}")

    # ---- time ----------------------------------------------------------------------------------------------------

    @property
    def margin_s(self) -> float:
        """Seconds before the job's end at which the drain begins; 0.0: never by our own clock."""
        configured, needed = float(self._cluster.job.margin_s), needed_s(self.record.checkpoint_s)
        if configured and needed > configured and not self._early_told:
            self._early_told = True
            self._tell(
                f"cluster.job.margin_s={configured:g} is below {SAFETY:g} x {self.record.checkpoint_s:.1f} s, the"
                f" longest checkpoint: the drain begins {needed:.0f} s before the end of the job"
            )
        return max(configured, needed) if configured else 0.0

    def left_s(self) -> float | None:
        """Seconds until the drain begins; None where nothing is known to end the job."""
        if self._job is None or self._job.end is None or not self.margin_s:
            return None
        return self._job.end - self.margin_s - self._clock()

    def permit(self) -> Permit:
        """May an execution start now?"""
        if self.ending is not None:
            return HOLD
        if self._cluster.runners == "external":
            return RUN  # harnesses outlive this job
        left = self.left_s()
        if left is None:
            return RUN
        now, need = self._clock(), self.durations.p90()
        if self._first_asked_at is None:
            self._first_asked_at = now
        span = left + now - self._first_asked_at
        return permit(
            self._cluster.job.walltime_policy, self._overall_s if need is None else need, left, span
        )

    def due(self, idle: Callable[[], bool] = lambda: False) -> bool:
        """Whether the checkpoint must begin: nothing is under way, or it gets no more time."""
        if self.ending is None:
            return False
        begin = leave_at(self.ending, self.record.checkpoint_s, SAFETY)
        return begin is None or self._clock() >= begin or idle()

    def time_to_save(self) -> Callable[[], float]:
        """Seconds left for the last checkpoint, which begins now; to be asked again: an end that comes sooner shortens them."""
        began, needed = self._clock(), max(CHECKPOINT_GRACE_S, needed_s(self.record.checkpoint_s))

        def left_s() -> float:
            end = self.ending.end if self.ending is not None else None
            until = began + needed if end is None else max(began + 1.0, end - 1.0)
            return until - self._clock()

        return left_s

    def shutdown_within_s(self) -> float:
        """Seconds for all peers to end by themselves."""
        end = self.ending.end if self.ending is not None else None
        return SHUTDOWN_GRACE_S if end is None else min(SHUTDOWN_GRACE_S, max(1.0, end - self._clock() - 3.0))

    def checkpoint_took(self, seconds: float) -> None:
        """A checkpoint was written; the longest is kept for the jobs after this one."""
        if seconds > self.record.checkpoint_s:
            self._write(JobRecord(seconds, self.record.fruitless))

    # ---- handing back --------------------------------------------------------------------------------------------

    @property
    def how(self) -> How:
        """How the job is handed back."""
        if self.ending is None or not self._id:
            return How.NOT
        job = self._cluster.job
        if (
            self.ending.cause is Cause.TIMED_OUT and not job.margin_s
        ):  # asked for: the time limit just ends the job
            return How.NOT
        return how(job.requeue_by, job.requeue, self.ending.cause, self._job, self._site, self._preempt_mode)

    async def leave_successor(self) -> None:
        """Submit the successor, where it is one: right behind the checkpoint, before any grace time is over.

        Where that fails `hand_back` tries again.
        """
        if self.how is not How.SUCCESSOR or self._stuck():
            return
        try:
            self._successor = (await asyncio.to_thread(submit_successor, self._layout, self._id)).job
        except GyreError as error:
            log.warning("%s", error)

    def hand_back(self) -> None:
        """The last thing of all. Raises HandedBack or NoProgress; returns where the run waits for a person."""
        way, ending = self.how, self.ending
        if way is How.NOT or ending is None:
            return
        if self._stuck():
            raise NoProgress(
                f"{self._layout.root}: {self._fruitless()} jobs in a row took no step and recorded no outcome, the last"
                f" ended by {ending}: it is not handed back (cluster.job.fruitless_jobs)",
                fix=f"raise cluster.job.time or lower harness.timeout_s; then: gyre submit resume={self._layout.root}",
            )
        self._write(JobRecord(self.record.checkpoint_s, self._fruitless()))
        code = 128 + (12 if ending.signal == "SIGUSR2" else 15)
        if way is How.EXIT:
            code, by = self._site.requeue_exit[0], f"exit code {self._site.requeue_exit[0]} (RequeueExit)"
        else:
            by = self._persisting(self._requeue if way is How.SCONTROL else self._succeed)
        raise HandedBack(
            f"{self._layout.root}: ended early by {ending}, handed back by {by}",
            fix="nothing: the run goes on by itself",
            exit_code=code,
        )

    def _persisting(self, act: Callable[[], str]) -> str:
        """Hand back, again and again while Slurm does not answer. Raises SlurmCommandFailed when there is no more time."""
        end = self.ending.end if self.ending is not None else None
        until = self._clock() + PERSIST_S if end is None else min(end, self._clock() + PERSIST_S)
        while True:
            try:
                return act()
            except SlurmCommandFailed as error:
                if self._clock() + AGAIN_S >= until:
                    raise
                log.warning("tried again: %s", error)
                self._pause(AGAIN_S)

    def _requeue(self) -> str:
        """`scontrol requeue`; a successor where it is refused. Raises SlurmCommandFailed where nobody knows."""
        try:
            query("scontrol", "requeue", self._id)
        except SlurmCommandFailed as error:
            job = lifetime.ask_job(self._id)
            if job is None:
                raise
            if job.state not in ENDING_STATES or job.timed_out:  # else the answer to it came late
                log.warning("%s: a successor is submitted instead", error)
                return self._succeed()
        keep_bad_nodes_from(self._id, self._layout)
        return "scontrol requeue"

    def _succeed(self) -> str:
        self._successor = self._successor or submit_successor(self._layout, self._id).job
        return f"job {self._successor}, which waits for its end"

    def _fruitless(self) -> int:
        """Jobs in a row without progress, this one included. A preemption says nothing about the run."""
        if self.progressed:
            return 0
        preempted = self.ending is not None and self.ending.cause is Cause.PREEMPTION
        return self.record.fruitless + (not preempted)

    def _stuck(self) -> bool:
        return self._fruitless() >= self._cluster.job.fruitless_jobs

    def _write(self, record: JobRecord) -> None:
        self.record = record
        write_record(self._layout, record)
