"""Hand a run folder to Slurm as one job, through submitit.

submitit's executor writes the file, calls sbatch and reads the id; the script it submits is ours (`script.render`), so no
Python of submitit runs in the job, none of its signal handlers stands before the controller's, and nothing is pickled.
sbatch sees the caller's environment without what an enclosing job left in it (SLURM_CONF is kept): those variables
are options to sbatch, and would reach every process of the run.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from gyre_hpc.config import RunConfig, load_run_config, save_run_config
from gyre_hpc.errors import MissingInput
from gyre_hpc.launch.commands import SlurmCommandFailed
from gyre_hpc.launch.job.margin import check_margin
from gyre_hpc.launch.job.request import request_for
from gyre_hpc.launch.job.script import Names, render
from gyre_hpc.launch.plan import child_environment
from gyre_hpc.layout import RunLayout


@dataclass(frozen=True)
class Submission:
    """A job Slurm has taken."""

    job: str
    script: Path
    log: Path


class ScriptExecutor(SlurmExecutor):  # type: ignore[misc,unused-ignore]
    """submitit's Slurm executor, with the whole script given instead of made from parameters."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder=folder)
        self._script = script

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        """Without what an enclosing job left. `os.environ` stays: other threads start processes from it meanwhile."""
        left = sorted(os.environ.keys() - child_environment({}).keys())
        return ["env", *(word for name in left for word in ("-u", name)), "sbatch", str(submission_file_path)]


def script_for(config: RunConfig, layout: RunLayout) -> str:
    """The sbatch script of this run. Raises ConfigError where the configuration makes no job."""
    names = Names(
        name=config.name,
        run=layout.root,
        log=layout.jobs / "%j.log",
        package=layout.package,
        python=Path(sys.executable),
        folder=Path.cwd(),
        force=config.resume_force,
    )
    return render(request_for(config.cluster), config.cluster.job, names)


def submit(script: str, layout: RunLayout) -> Submission:
    """Submit `script`; it is kept beside its log in RUN/jobs. Raises SlurmCommandFailed with sbatch's words."""
    layout.jobs.mkdir(exist_ok=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            job = ScriptExecutor(layout.jobs, script)._submit_command("")
    except (FailedJobError, FailedSubmissionError) as error:
        raise SlurmCommandFailed(
            f"sbatch refused the job of {layout.root}: {error}",
            fix=f"correct cluster.job or cluster.cell, then: gyre submit resume={layout.root} cluster.job.KEY=VALUE",
        ) from error
    for link in layout.jobs.glob(".submission_file_*"):
        link.unlink()
    return Submission(str(job.job_id), Path(job.paths.submission_file), layout.jobs / f"{job.job_id}.log")


def submit_run(config: RunConfig, layout: RunLayout, after: str = "") -> Submission:
    """Submit the run. Its `cluster.job` is kept in config.yaml: the controller goes by what its job was asked with. Nodes excluded
    for once are not kept, nor that it starts no earlier than the job `after` (flat; components cannot all depend).

    Raises ConfigError for a margin that no checkpoint of the run fits into, and what `submit` raises.
    """
    check_margin(config.cluster.job, layout)
    kept = load_run_config(layout.root)
    asked = replace(config.cluster.job, exclude=kept.cluster.job.exclude)
    if kept.cluster.job != asked:
        kept.cluster.job = asked
        save_run_config(kept, layout.root)
    if after and config.cluster.layout == "flat":
        job = replace(config.cluster.job, sbatch=[*config.cluster.job.sbatch, f"--dependency=after:{after}"])
        config = replace(config, cluster=replace(config.cluster, job=job))
    return submit(script_for(config, layout), layout)


def check_slurm() -> None:
    """Raise MissingInput where Slurm's commands are absent, before anything is written."""
    if SlurmExecutor.affinity() < 0:
        raise MissingInput(
            "srun: no such program", fix="submit from a login node, or look at the script with --dry-run"
        )
