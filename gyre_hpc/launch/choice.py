"""Which launcher a run uses; the controller's one way in."""

from __future__ import annotations

from gyre_hpc.config import ClusterConfig
from gyre_hpc.launch.local import LocalLauncher
from gyre_hpc.launch.plan import SiteLauncher
from gyre_hpc.launch.slurm import SlurmLauncher
from gyre_hpc.layout import RunLayout


def make_launcher(cluster: ClusterConfig, layout: RunLayout) -> SiteLauncher:
    """The launcher of `cluster.kind`. Raises ConfigError for slurm outside an allocation."""
    if cluster.kind == "slurm":
        return SlurmLauncher.from_environment(cluster, layout)
    return LocalLauncher()
