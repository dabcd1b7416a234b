"""What becomes of a job whose batch host is lost: Slurm leaves it running without its batch process, for ever.

Every process of a run that has lost its controller for good calls `outlive` when its own work is over, and ends when it
returns: after `cluster.orphan_grace_s` it hands the job back (`scontrol requeue`, where cluster.job.requeue, else scancel).
That happens once Slurm itself has cut the batch host out of the job (after its SlurmdTimeout), and never when a newer
controller owns the run, when the run is done, or when the job has ended or was restarted since: a broken link alone proves
nothing. What Slurm calls well for WELL_S is well, and this process alone is cut off: it ends. Several processes may do all this
at the same time; the larger the job, the more seldom each asks. Outside Slurm, in another job than the controller's, or where Slurm's
commands are absent (a container) nobody is freed.

A guest's cell that has lost its link calls `outlive_host`: the same for its own job, whose batch process is the cell host.
There the run's controller says nothing about the job, and whether it is requeued is what it was submitted with.
"""

from __future__ import annotations

import enum
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.files import LogFile
from gyre_hpc.launch.commands import hostnames, query
from gyre_hpc.launch.identity import job_id
from gyre_hpc.launch.job.lifetime import ask_job
from gyre_hpc.launch.nodes.bad_nodes import BadNodes, keep_bad_nodes_from
from gyre_hpc.launch.owner import Owner, owner_path, read_owner
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.hosts import node_name

log = logging.getLogger(__name__)
LOOK_S: Final = 5.0
MOST_LOOK_S: Final = 60.0
NODES_A_LOOK: Final = 16
"""Nodes of a job whose processes may ask every LOOK_S; those of a larger one do in proportion, at least every MOST_LOOK_S."""
WELL_S: Final = 1800.0
"""Longer than any site's SlurmdTimeout, after which Slurm notices that a host is lost."""
ALIVE: Final = frozenset({"RUNNING", "SUSPENDED"})


class Verdict(enum.Enum):
    """What an orphan does next."""

    WAIT = "wait"
    LEAVE = "leave"
    FREE = "free"


@dataclass(frozen=True)
class JobNow:
    """What Slurm says of the job. `batch_host`: the node of its batch process; `nodes`: those it still has."""

    state: str
    restarts: int
    batch_host: str
    nodes: frozenset[str]


def judge(
    job: JobNow | None, restarts: int, *, over: bool, superseded: bool, well_s: float = 0.0
) -> tuple[Verdict, str]:
    """The verdict and why. `job` None: Slurm does not say. `restarts`: the lost controller's count of the job's restarts.

    `over`: the grace is over. `superseded`: a newer controller owns the run, or the run is done. `well_s`: since when Slurm
    calls the batch host well.
    """
    if superseded:
        return Verdict.LEAVE, "the run has another controller, or is done"
    if not over:
        return Verdict.WAIT, "a controller may come back"
    if job is None:
        return Verdict.WAIT, "Slurm does not say how the job is"
    if job.state not in ALIVE or job.restarts > restarts:
        return Verdict.LEAVE, f"the job is {job.state}, restart {job.restarts}"
    if job.batch_host in job.nodes:
        if well_s > WELL_S:
            return (
                Verdict.LEAVE,
                f"for Slurm {job.batch_host} has been well for {WELL_S:g} s: only this process is cut off",
            )
        return Verdict.WAIT, f"for Slurm the batch host {job.batch_host} is well"
    return Verdict.FREE, f"Slurm has lost the batch host {job.batch_host}"


def outlive(layout: RunLayout, cluster: ClusterConfig, epoch: int, *, waited_s: float = 0.0) -> None:
    """Return when the job is freed or nobody's to free; at once outside Slurm.

    `epoch` is the lost controller's (`incarnations.epoch_of`), `waited_s` what of the grace is over. To be called from the main
    thread, without an event loop. SIGTERM and SIGINT end it.
    """
    owner = _owner(layout, epoch) if cluster.kind == "slurm" else None
    if owner is None or not owner.job:
        return
    if owner.job not in own_jobs(os.environ):
        log.warning("the controller is gone; job %s is not ours to free", owner.job)
        return
    _logged_beside(layout, epoch)
    log.warning("the controller in job %s is gone; waiting for another, or for Slurm to lose it", owner.job)
    lost = _watch(
        owner.job,
        cluster.orphan_grace_s,
        owner.restart_count,
        waited_s=waited_s,
        superseded=lambda: _superseded(layout, epoch),
    )
    if lost is not None:
        BadNodes(layout, cluster).lost(lost.batch_host, f"the batch host of job {owner.job}")
        requeued = free(owner.job, requeue=cluster.job.requeue, fix=f"gyre submit resume={layout.root}")
        if requeued:
            keep_bad_nodes_from(owner.job, layout)


def outlive_host(layout: RunLayout, cluster: ClusterConfig, epoch: int) -> None:
    """Return when the guests' job this cell is a step of is freed or not to be freed; at once outside Slurm."""
    mine = job_id()
    if cluster.kind != "slurm" or not mine:
        return
    _logged_beside(layout, epoch)
    log.warning("the link is gone; waiting for the cell host of job %s, or for Slurm to lose it", mine)
    lost = _watch(mine, cluster.orphan_grace_s)
    if lost is not None:
        BadNodes(layout, cluster).lost(lost.batch_host, f"the batch host of job {mine}")
        asked = ask_job(mine)
        free(mine, requeue=asked is not None and asked.requeue, fix=f"gyre cells add {layout.root}")


def _watch(
    id: str,
    grace_s: float,
    restarts: int | None = None,
    *,
    waited_s: float = 0.0,
    superseded: Callable[[], bool] = lambda: False,
) -> JobNow | None:
    """Look until there is a verdict; the job if it is to be freed. `restarts` None: those of the first look."""
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    began, said, look_s = time.monotonic() - waited_s, "", LOOK_S
    well_since: float | None = None
    while not ending.wait(look_s * random.uniform(0.5, 1.0)):
        now = time.monotonic()
        over = now - began >= grace_s
        job = job_now(id) if over else None
        if job is not None:
            look_s = max(LOOK_S, min(MOST_LOOK_S, LOOK_S * len(job.nodes) / NODES_A_LOOK))
            well_since = (well_since or now) if job.batch_host in job.nodes else None
        restarts = job.restarts if restarts is None and job is not None else restarts
        verdict, why = judge(
            job,
            restarts or 0,
            over=over,
            superseded=superseded(),
            well_s=0.0 if well_since is None else now - well_since,
        )
        if why != said:
            log.warning("%s: %s", verdict.value, why)
            said = why
        if verdict is not Verdict.WAIT:
            return job if verdict is Verdict.FREE else None
    return None


def free(job: str, *, requeue: bool, fix: str) -> bool:
    """Hand the job back to Slurm; where that is refused, end it, unless another survivor was faster. Whether it is requeued."""
    if requeue:
        try:
            query("scontrol", "requeue", job)
            log.warning("job %s is requeued", job)
            return True
        except GyreError as error:
            log.warning("%s", error.message)
        now = job_now(job)
        if now is None or now.state not in ALIVE:
            return False
    try:
        query("scancel", job)
        log.warning("job %s is cancelled; go on with: %s", job, fix)
    except GyreError as error:
        log.error("job %s keeps its nodes until its time limit: %s", job, error.message)
    return False


def job_now(job: str) -> JobNow | None:
    """Ask Slurm; None if it does not say. A job it has forgotten has ended."""
    try:
        words = query(
            "squeue",
            "-h",
            "--states=all",
            "-j",
            job,
            "-O",
            "State:40,RestartCnt:12,BatchHost:256,NodeList:8192",
        ).split()
        nodes = hostnames(words[3]) if len(words) > 3 else []
    except GyreError as error:
        log.info("%s", error.message)
        return None
    if len(words) < 3:
        return JobNow("forgotten by Slurm", 0, "", frozenset())
    return JobNow(words[0], int(words[1]), words[2], frozenset(nodes))


def own_jobs(env: Mapping[str, str]) -> set[str]:
    """Ids of the job this process is a step of; of a heterogeneous job the first component's as well."""
    names = ("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0")
    return {env[name] for name in names if env.get(name)}


def _owner(layout: RunLayout, epoch: int) -> Owner | None:
    try:
        owner = read_owner(layout.root)
    except GyreError as error:
        log.error("%s", error)
        return None
    return owner if owner is not None and owner.epoch == epoch else None


def _superseded(layout: RunLayout, epoch: int) -> bool:
    try:
        mine = owner_path(layout.root, epoch).stat().st_mtime
        done = layout.summary.exists() and layout.summary.stat().st_mtime >= mine
    except OSError as error:
        log.warning("%s", error)
        return False
    return done or _owner(layout, epoch) is None


def _logged_beside(layout: RunLayout, epoch: int) -> None:
    """The log of a step goes through its srun, which is gone: what follows is kept in a file of its own."""
    try:
        handler = LogFile(layout.logs(epoch) / f"orphan-{node_name()}-{os.getpid()}.log")
    except OSError as error:
        log.warning("%s", error)
        return
    logging.getLogger().addHandler(handler)
