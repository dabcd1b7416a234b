"""What a job needs on disk before it starts, looked for on the login node: `gyre stage`, and every `gyre submit`.

A job runs offline, often hours after its submission; what is missing then has cost a place in the queue. Each need is
looked up with the code that will use it. What only a compute node knows (sandbox, devices) is not judged here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gyre_hpc import models
from gyre_hpc.config import RunConfig
from gyre_hpc.errors import GyreError, MissingInput
from gyre_hpc.executions.harness import find_harness
from gyre_hpc.executions.tasks import task_source
from gyre_hpc.harnesses.locks import lock_of
from gyre_hpc.harnesses.packages import install, prefix_of
from gyre_hpc.launch.job.broadcast import parts
from gyre_hpc.layout import RunLayout
from gyre_hpc.training.replay import FILE_NAME


@dataclass(frozen=True)
class Need:
    """One thing a job needs: where it was found, or the error that names it as missing."""

    what: str
    found: str = ""
    error: GyreError | None = None


def needs(config: RunConfig, run: RunLayout | None = None) -> list[Need]:
    """Everything the run needs, found or not; a run that goes on has its model in its own folder."""
    root = run.root if run else Path(config.root).absolute()
    return [
        _need("model", lambda: _model(config, run)),
        _need("harness", lambda: find_harness(config.harness).command[0]),
        _need("tasks", lambda: _family(config)),
        _need("python", lambda: f"{sys.executable} with {len(_requirements())} packages"),
        _need("run folder", lambda: _writable(root)),
        *_broadcast(config.cluster.broadcast),
        *_container(config.cluster.container),
    ]


def fetch(config: RunConfig, run: RunLayout | None = None) -> list[str]:
    """Fetch what the login node can and the job cannot: a model of the hub, the harness's packages. A line about each that was new.

    Raises what `models.hub.stage` raises for a model that is not staged yet, InstallFailed with the installer's last words,
    ConfigError for packages that name no version.
    """
    fetched = [] if run or not config.model.path.startswith(models.HUB) else _fetch_model(config)
    return [*fetched, *_fetch_harness(config)]


def _fetch_model(config: RunConfig) -> list[str]:
    from gyre_hpc.models import hub

    path, staged = config.model.path, models.staged_folder(config)
    try:
        line = hub.stage(path, staged)
    except hub.HubFailed as error:
        kept = models.hub_model(path).found(staged)
        if kept is None:
            raise
        line = f"kept {kept} as it was staged before; {error.message}"
    return [line] if line else []


def _fetch_harness(config: RunConfig) -> list[str]:
    harness = config.harness
    if not harness.packages:
        return []
    prefix = prefix_of(harness.packages, harness.prefix)
    return (
        [f"installed {', '.join(harness.packages)} in {prefix}"]
        if install(harness.packages, prefix, lock_of(harness))
        else []
    )


def check_staged(config: RunConfig, run: RunLayout | None = None) -> None:
    """Raise MissingInput naming everything that is missing, with what to do about each."""
    errors = [need.error for need in needs(config, run) if need.error is not None]
    if errors:
        raise MissingInput(
            "the job would miss:\n" + "\n".join(f"  {error.message}" for error in errors),
            fix="; ".join(dict.fromkeys(error.fix for error in errors)),
        )


def _need(what: str, look: Callable[[], str]) -> Need:
    try:
        return Need(what, found=look())
    except GyreError as error:
        return Need(what, error=error)


def _model(config: RunConfig, run: RunLayout | None) -> str:
    folder = models.resolve(str(run.model)) if run else models.configured(config)
    objective = config.objective
    if objective.replay_weight > 0 and not (folder / FILE_NAME).is_file():
        raise MissingInput(
            f"{folder / FILE_NAME}: no such file, but objective.replay_weight={objective.replay_weight}",
            fix="set objective.replay_weight=0, or name a model made by gyre warmstart",
        )
    return str(folder)


def _requirements() -> list[str]:
    """Packages gyre_hpc needs at run time, all installed. Raises MissingInput naming those that are not."""
    wanted = [
        re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0]
        for text in importlib.metadata.requires("gyre_hpc") or []
        if "extra ==" not in text
    ]
    absent = [name for name in wanted if not _installed(name)]
    if absent:
        raise MissingInput(
            f"{sys.executable}: no package {', '.join(absent)}",
            fix=f"{sys.executable} -m pip install {' '.join(absent)}",
        )
    return wanted


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _writable(root: Path) -> str:
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise MissingInput(f"root={root}: {existing} is not a folder you may write to", fix="set root=FOLDER")
    return str(root)


def _family(config: RunConfig) -> str:
    task_source(config.tasks)
    return config.tasks.family


def _broadcast(what: str) -> Iterator[Need]:
    if what != "none":
        yield _need("broadcast", lambda: ", ".join(str(part.source) for part in parts(what)))


def _container(words: list[str]) -> Iterator[Need]:
    """The program and the image files among the words; pyxis fetches its images itself."""
    if words and not words[0].startswith("-"):
        yield _need("container program", lambda: _program(words[0]))
    for image in (word for word in words if word.endswith((".sif", ".sqsh"))):
        yield _need("container image", partial(_file, Path(image.partition("=")[2] or image)))


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingInput(
            f"cluster.container: no program '{name}' here", fix="module load it, or name its full path"
        )
    return found


def _file(path: Path) -> str:
    if not path.is_file():
        raise MissingInput(f"cluster.container: {path}: no such file", fix="build or copy the image there")
    return str(path)
