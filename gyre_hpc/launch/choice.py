"""Which launcher a run uses; the controller's one way in."""

from __future__ import annotations

import asyncio
import logging
import sys

from gyre_hpc.config import RunConfig
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import GyreError
from gyre_hpc.launch.identity import job_id
from gyre_hpc.launch.job.state import gone
from gyre_hpc.launch.local import LocalLauncher
from gyre_hpc.launch.nodes import scratch
from gyre_hpc.launch.nodes.leftovers import jobs_known
from gyre_hpc.launch.plan import SiteLauncher
from gyre_hpc.launch.slurm import SlurmLauncher
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)


def make_launcher(cluster: ClusterConfig, layout: RunLayout) -> SiteLauncher:
    """The launcher of `cluster.kind`. Raises ConfigError for slurm outside an allocation."""
    if cluster.kind == "slurm":
        return SlurmLauncher.from_environment(cluster, layout)
    return LocalLauncher()


async def tidy_nodes(launcher: object, config: RunConfig, layout: RunLayout, *, over: bool = False) -> None:
    """Remove what processes of the run left on its nodes (`scratch`); for when none of them is left.

    `over`: the run is done for good, and what it would need to go on goes as well.
    """
    if isinstance(launcher, SlurmLauncher):
        ended = await asyncio.to_thread(_ended_jobs, layout)
        how = ["--over"] if over else []
        command = [sys.executable, "-m", scratch.__name__, "--run", str(layout.root), *how, "--ended", *ended]
        try:
            await launcher.everywhere(command, layout.logs(0).parent / "tidy.log")
        except GyreError as error:
            log.warning("what the run left on its nodes stays there: %s", error)
    scratch.remove(config.cluster, layout)
    if over:
        scratch.remove_pages(config, layout)


def _ended_jobs(layout: RunLayout) -> list[str]:
    """The run's other jobs that have ended: what was killed with them may lie on the nodes of this one."""
    return sorted(gone(sorted(jobs_known(layout) - {job_id()})))


def may_find_leftovers(cluster: ClusterConfig, epoch: int) -> bool:
    """Whether an earlier controller's processes may have left things on these nodes; none of them is left.

    Under Slurm they ended with their job, or with the earlier start of this one; elsewhere gateway and runner may live.
    """
    return cluster.kind == "slurm" and epoch > 1
