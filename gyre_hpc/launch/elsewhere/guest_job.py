"""The Slurm job of guests: room for some cells of a live run, its batch process their host, no services.

Shape and container of the cells are the run's own; partition, time and the rest of `cluster.job` may be others. The job is
never given back to the queue unless asked for: cells of a preempted job are not missed for long.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from gyre_hpc.config import RunConfig
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.job.request import JobRequest, request_for_cells
from gyre_hpc.launch.job.script import Names, render
from gyre_hpc.layout import RunLayout

HOST_MEM_MB: Final = 512
"""Memory of the cell host, which shares the first node with cells."""


def request_for_guests(cluster: ClusterConfig, cells: int) -> JobRequest:
    """Nodes for `cells` cells. Raises ConfigError for a run outside Slurm, or no cell."""
    if cluster.kind != "slurm":
        raise ConfigError(
            f"cluster.kind={cluster.kind}: the cells of this run are no Slurm steps",
            fix="start a host by hand, on a machine that reaches the controller: gyre cells host RUN --cells N",
        )
    component = request_for_cells(replace(cluster, cells=cells))
    return JobRequest((replace(component, mem_mb=component.mem_mb + HOST_MEM_MB),), ())


def guest_script(config: RunConfig, layout: RunLayout, cells: int, *, rollout_only: bool) -> str:
    """The sbatch script. It runs the code that was frozen with the run."""
    words = ["cells", "host", str(layout.root), f"--cells={cells}"]
    words += ["--rollout-only"] * rollout_only + ["--requeue"] * config.cluster.job.requeue
    names = Names(
        name=f"{config.name}-cells",
        run=layout.root,
        log=layout.jobs / "%j.log",
        package=layout.package,
        python=Path(sys.executable),
        folder=Path.cwd(),
        command=tuple(words),
        warning="TERM",
    )
    return render(request_for_guests(config.cluster, cells), config.cluster.job, names)
