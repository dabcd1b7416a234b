"""Another job for the run of this one, waiting for its end: the way on where Slurm would not start the job itself again.

The script is the one the job was submitted with (kept in RUN/jobs, else asked of Slurm), with a dependency on the job and
`resume=RUN` as its argument, so that slurm/train.sbatch goes on as well. Of a script that Slurm gives, what the job was
given on the command line of sbatch is not part; it is read off the job. The environment is scrubbed as at any submission.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from pathlib import Path
from typing import Final

from gyre_hpc.launch.commands import query
from gyre_hpc.launch.job.submit import Submission, submit
from gyre_hpc.launch.nodes.bad_nodes import keep_bad_nodes_from
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)

ASKED: Final = {
    "JobName": "job-name",
    "Partition": "partition",
    "Account": "account",
    "QOS": "qos",
    "Reservation": "reservation",
    "TimeLimit": "time",
    "NumNodes": "nodes",
    "CPUs/Task": "cpus-per-task",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
    "Features": "constraint",
    "ExcNodeList": "exclude",
    "StdOut": "output",
    "WorkDir": "chdir",
}
"""Fields of `scontrol show job` and the options of sbatch that ask for them again."""
_UNASKED: Final = frozenset({"", "(null)", "N/A", "None", "UNLIMITED", "0"})
_FIELD: Final = re.compile(r"(?:^|\s)([A-Za-z:/]+)=(\S*)")


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
    script = query("scontrol", "write", "batch_script", job, "-") + "\n"
    shown = query("scontrol", "show", "job", "--oneliner", job)
    if len(shown.splitlines()) > 1:  # heterogeneous: which line is which component's is the script's to say
        return script
    return with_options(script, options_of(shown, os.environ.get("SLURM_JOB_NUM_NODES", "")))


def options_of(shown: str, nodes: str) -> list[str]:
    """What a flat job asked for, as options of sbatch (pure). `nodes`: how many it began with; a lost one is not counted any more."""
    told = dict(_FIELD.findall(shown))
    told["NumNodes"] = nodes or told.get("NumNodes", "")
    found = [
        f"--{option}={told[field]}" for field, option in ASKED.items() if told.get(field, "") not in _UNASKED
    ]
    tasks = told.get("NtasksPerN:B:S:C", "").partition(":")[0]
    found += [f"--ntasks-per-node={tasks}"] if tasks not in _UNASKED else []
    gres = told.get("TresPerNode", "").replace("gres:", "")
    found += [f"--gres={gres}"] if gres not in _UNASKED else []
    return found + (["--no-requeue"] if told.get("Requeue") == "0" else [])


def with_options(script: str, options: list[str]) -> str:
    """`script` with further options, which win over those before them (pure)."""
    lines = script.splitlines()
    at = _last_option(lines) + 1
    return (
        "\n".join([*lines[:at], *(f"#SBATCH {shlex.quote(option)}" for option in options), *lines[at:]])
        + "\n"
    )


def continued(script: str, run: Path, job: str) -> str:
    """`script` as that of a job that waits for the end of `job` and goes on with `run` (pure)."""
    ours = re.compile(r"#SBATCH\s+'?(--dependency\b|-d(\b|after|singleton))|set -- '?resume=")
    lines = [line for line in script.splitlines() if not ours.match(line)]
    lines.insert(1, f"#SBATCH --dependency=afterany:{job}")
    lines.insert(_last_option(lines) + 1, "set -- " + shlex.quote(f"resume={run}"))
    return "\n".join(lines) + "\n"


def _last_option(lines: list[str]) -> int:
    """The line of the last option of sbatch; the first line where there is none."""
    return max((index for index, line in enumerate(lines) if line.startswith("#SBATCH")), default=0)
