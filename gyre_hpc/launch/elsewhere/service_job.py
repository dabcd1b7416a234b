"""The Slurm job of gateway and runner under `cluster.runners=external`: one node of CPUs, its batch process `gyre services RUN`.

It is submitted before the run's own job, which waits for its start, and again by the controller when it has ended before the
run. Its id lies in the run folder (`services/job`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from gyre_hpc.config import RunConfig
from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.files import replace_file
from gyre_hpc.launch.job.request import EXTERNAL, Component, JobRequest
from gyre_hpc.launch.job.script import Names, render
from gyre_hpc.launch.job.state import ENDED, job_state
from gyre_hpc.launch.job.submit import Submission, submit, submit_run
from gyre_hpc.launch.nodes.placement import megabytes
from gyre_hpc.layout import RunLayout

HOST_MEM_MB: Final = 256
"""Memory of the process that watches the two."""


def request_for_services(cluster: ClusterConfig) -> JobRequest:
    """One node with room for both."""
    sizes = [getattr(cluster.service, name) for name in EXTERNAL]
    component = Component(
        holds=", ".join(EXTERNAL),
        nodes=1,
        cpus=sum(size.cpus for size in sizes),
        mem_mb=sum(megabytes(size.mem) for size in sizes) + HOST_MEM_MB,
        partition=cluster.job.service_partition or cluster.job.partition,
    )
    return JobRequest((component,), ())


def services_script(config: RunConfig, layout: RunLayout) -> str:
    """The sbatch script. It runs the code that was frozen with the run."""
    job = replace(config.cluster.job, time=config.cluster.job.service_time, margin_s=0, exclusive=False)
    names = Names(
        name=f"{config.name}-services",
        run=layout.root,
        log=layout.jobs / "%j.log",
        package=layout.package,
        python=Path(sys.executable),
        folder=Path.cwd(),
        command=("services", str(layout.root)),
    )
    return render(request_for_services(config.cluster), job, names)


def submit_services(config: RunConfig, layout: RunLayout) -> Submission:
    """Submit the job and keep its id. Raises SlurmCommandFailed with sbatch's words."""
    taken = submit(services_script(config, layout), layout)
    layout.services.mkdir(exist_ok=True)
    replace_file(layout.service_job, taken.job.encode())
    return taken


def submit_both(config: RunConfig, layout: RunLayout) -> Submission:
    """Submit the run's job, behind that of its gateway and runner where they have one of their own."""
    external = config.cluster.runners == "external"
    return submit_run(config, layout, live_services(config, layout) if external else "")


def services_job(layout: RunLayout) -> str:
    """Id of the last such job; "" before the first."""
    return layout.service_job.read_text().strip() if layout.service_job.is_file() else ""


def live_services(config: RunConfig, layout: RunLayout) -> str:
    """The services job of this run, submitted if there is none or the last has ended. A state that is not known is no end."""
    job = services_job(layout)
    if job and job_state(job) not in ENDED:
        return job
    return submit_services(config, layout).job
