"""Hand a run folder to Slurm as one job, through submitit.

submitit's executor writes the file, calls sbatch and reads the id; the script it submits is ours (`script.render`), so no
Python of submitit runs in the job, none of its signal handlers stands before the controller's, and nothing is pickled.
A script is submitted once: where sbatch fails, Slurm is asked whether it has taken the job all the same (the answer was lost).
If that is not answered either, the file stays in RUN/jobs, and the next call for the same script asks first.
sbatch sees the caller's environment without what an enclosing job left in it (SLURM_CONF is kept): those variables
are options to sbatch, and would reach every process of the run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from gyre_hpc.config import RunConfig, load_run_config, save_run_config
from gyre_hpc.errors import MissingInput
from gyre_hpc.launch.commands import SlurmCommandFailed, query
from gyre_hpc.launch.job.margin import check_margin
from gyre_hpc.launch.job.request import request_for
from gyre_hpc.launch.job.script import Names, render
from gyre_hpc.launch.plan import child_environment
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)
PENDING = ".submission_file_"
"""How submitit names a script until sbatch has told the id of its job."""


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
    if (job := _taken(script, layout)) is not None:
        return _submission(job, layout)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            taken = ScriptExecutor(layout.jobs, script)._submit_command("")
    except (FailedJobError, FailedSubmissionError) as error:
        if (job := _taken_if_told(script, layout)) is not None:
            log.warning("sbatch failed, but job %s is taken: %s", job, error)
            return _submission(job, layout)
        raise SlurmCommandFailed(
            f"sbatch refused the job of {layout.root}: {error}",
            fix=f"correct cluster.job or cluster.cell, then: gyre submit resume={layout.root} cluster.job.KEY=VALUE",
        ) from error
    for link in layout.jobs.glob(f"{PENDING}*"):
        link.unlink()
    return _submission(str(taken.job_id), layout)


def _submission(job: str, layout: RunLayout) -> Submission:
    return Submission(job, layout.jobs / f"{job}_submission.sh", layout.jobs / f"{job}.log")


def _taken_if_told(script: str, layout: RunLayout) -> str | None:
    try:
        return _taken(script, layout)
    except SlurmCommandFailed as error:
        log.warning("%s", error)
        return None


def _taken(script: str, layout: RunLayout) -> str | None:
    """The job that an earlier sbatch made of this script, though it failed; None if there is none.

    A file that Slurm has made no job of is removed. Raises SlurmCommandFailed where Slurm does not say.
    """
    files = [path for path in layout.jobs.glob(f"{PENDING}*") if path.is_file() and not path.is_symlink()]
    same = {str(path.absolute()): path for path in files if path.read_text() == script}
    if not same:
        return None
    found = None
    lines = query("squeue", "-h", "--states=all", f"--user={os.getuid()}", "-o", "%i|%o").splitlines()
    for job, command in map(_job_and_command, lines):
        if command in same:
            found = job
            same.pop(command).replace(layout.jobs / f"{job}_submission.sh")
    for path in same.values():
        path.unlink()
    return found


def _job_and_command(line: str) -> tuple[str, str]:
    job, _, command = line.partition("|")
    return job.strip().removesuffix("+0"), command.strip()


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
