"""The sbatch script of one run, rendered from its configuration and request (pure).

The script ends in `exec`: the controller is the batch process, so Slurm's signals reach it and its exit code is the
job's. It names the run folder only: the job goes on from whatever lies there, at its first start as after a requeue, and
runs the copy of the package that was frozen at submission. Nothing is fetched from the network.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gyre_hpc.config_job import JobConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.job.request import Component, JobRequest

OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""A compute node without a network must fail at once, not after a time-out."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Names:
    """Where things are: all absolute. `python` has the package's dependencies; `folder` is where submit was called.

    `warning`: signal to the batch process ahead of the time limit. `force`: take the run over from an owner of which Slurm knows nothing any more. `command`: the batch process in words of
    `gyre`; empty: the run's controller.
    """

    name: str
    run: Path
    log: Path
    package: Path
    python: Path
    folder: Path
    warning: str = "USR2"
    force: bool = False
    command: tuple[str, ...] = ()


def render(request: JobRequest, job: JobConfig, names: Names) -> str:
    """The whole script. Raises ConfigError for values that a script cannot carry."""
    for path in (names.run, names.python, names.folder):
        if re.search(r"[%\n]", str(path)):
            raise ConfigError(
                f"{path}: a path with '%' or a line break cannot be given to Slurm", fix="rename it"
            )
    lines = [
        "#!/bin/bash",
        _origin(names),
    ]
    for index, component in enumerate(request.components):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [_directive(word) for word in _component(component, job, names)]
        lines += [_directive(word) for word in _batch(job, names)] if index == 0 else []
    return "\n".join([*lines, "", "set -eo pipefail", *_environment(job, names), *_command(names), ""])


def _origin(names: Names) -> str:
    if names.command:
        return f"# Written by gyre for {names.run}: gyre {' '.join(names.command[:2])}"
    return f"# Written by gyre submit for {names.run}; to go on later: gyre submit resume=RUN"


def _component(component: Component, job: JobConfig, names: Names) -> Iterator[str]:
    yield f"--job-name=gyre-{names.name}"
    yield f"--nodes={component.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={component.cpus}"
    yield f"--mem={component.mem_mb}M"
    given = {
        "gres": component.gres,
        "time": job.time,
        "partition": component.partition,
        "account": job.account,
        "qos": job.qos,
        "reservation": job.reservation,
        "constraint": component.constraint,
        "exclude": job.exclude,
        "switches": component.switches,
    }
    yield from (f"--{key}={value}" for key, value in given.items() if value)
    if job.exclusive:
        yield "--exclusive"
    yield "--no-kill"
    yield "--requeue" if job.requeue else "--no-requeue"
    yield from job.sbatch


def _batch(job: JobConfig, names: Names) -> Iterator[str]:
    yield f"--chdir={names.folder}"
    yield f"--output={names.log}"
    yield "--open-mode=append"
    if job.margin_s:
        yield f"--signal=B:{names.warning}@{job.margin_s}"


def _directive(word: str) -> str:
    if not word.startswith("-") or "\n" in word:
        raise ConfigError(
            f"cluster.job: '{word}' is not an argument of sbatch", fix="write it like --qos=long"
        )
    return f"#SBATCH {shlex.quote(word)}"


def _environment(job: JobConfig, names: Names) -> Iterator[str]:
    yield from job.setup
    if job.modules:
        yield f"module load {shlex.join(job.modules)}"
    wrong = [name for name in job.env if not _NAME.fullmatch(name)]
    if wrong:
        raise ConfigError(
            f"cluster.job.env: '{wrong[0]}' is not a variable's name", fix="use letters, digits and _"
        )
    yield from (f"export {name}={shlex.quote(value)}" for name, value in (OFFLINE | job.env).items())
    path = shlex.quote(f"{names.package}:{names.folder}")
    yield f"export PYTHONSAFEPATH=1 PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}"


def _command(names: Names) -> Iterator[str]:
    controller = ["controller", f"resume={names.run}", *["resume_force=true"] * names.force]
    words = [str(names.python), "-u", "-m", "gyre_hpc.cli", *(names.command or controller)]
    yield "exec " + shlex.join(words)
