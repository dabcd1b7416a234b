"""Another job for the run of this one, waiting for its end: the way on where Slurm would not start the job itself again.

The script is the one the job was submitted with (kept in RUN/jobs, else asked of Slurm), with a dependency on the job and
`resume=RUN` as its argument, so that slurm/train.sbatch goes on as well. The environment is scrubbed as at any submission.
"""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

from gyre_hpc.launch.bad_nodes import keep_bad_nodes_from
from gyre_hpc.launch.commands import query
from gyre_hpc.launch.submit import Submission, submit
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)


def submit_successor(layout: RunLayout, job: str) -> Submission:
    """Submit it. Raises SlurmCommandFailed with sbatch's words, MissingInput where the script cannot be had."""
    taken = submit(continued(script_of(layout, job), layout.root, job), layout)
    log.info("job %s goes on after job %s", taken.job, job)
    keep_bad_nodes_from(taken.job, layout)
    return taken


def script_of(layout: RunLayout, job: str) -> str:
    """The script `job` was submitted with."""
    kept = layout.jobs / f"{job}_submission.sh"
    if kept.is_file():
        return kept.read_text()
    return query("scontrol", "write", "batch_script", job, "-") + "\n"


def continued(script: str, run: Path, job: str) -> str:
    """`script` as that of a job that waits for the end of `job` and goes on with `run` (pure)."""
    ours = re.compile(r"#SBATCH\s+.?--dependency=|set -- '?resume=")
    lines = [line for line in script.splitlines() if not ours.match(line)]
    lines.insert(1, f"#SBATCH --dependency=afterany:{job}")
    last = max(index for index, line in enumerate(lines) if line.startswith("#SBATCH"))
    lines.insert(last + 1, "set -- " + shlex.quote(f"resume={run}"))
    return "\n".join(lines) + "\n"
