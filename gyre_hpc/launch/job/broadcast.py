"""`cluster.broadcast`: the package, or the whole Python environment, onto each node's own disk before the first step.

The controller packs once into RUN/broadcast (named by a digest of names, sizes and times, so that a later attempt uses it
again), sends the files with sbcast (Slurm's own tree of nodes; per component) and has each node unpack them into the job's
node-local folder (`launch.scratch`, which removes them with the rest). Where sbcast is missing or refuses, nodes read the file
in the run folder: one long read in place of ten thousand opens. Whatever fails costs speed and never the run: a node
without its copy is named and its steps run from the shared folders.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import ConfigError, GyreError, MissingInput, StorageFull
from gyre_hpc.launch.job import unpack
from gyre_hpc.launch.job.node_copy import NodeCopy, read_outcomes
from gyre_hpc.launch.local import LocalProcess, spawn
from gyre_hpc.launch.nodes import scratch
from gyre_hpc.launch.plan import ProcessSpec
from gyre_hpc.launch.slurm import SlurmLauncher
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)
LIMIT_S: Final = unpack.LIMIT_S
"""Longest wait for each of packing, sending and unpacking: an environment of 10 GiB at 12 MiB/s."""
TAR_CHANGED: Final = 1
"""GNU tar: a file changed while it was read. Other processes write compiled modules; nothing else may change there."""
PACKAGE_ROOT: Final = Path(__file__).resolve().parents[3]
"""Where gyre_hpc is imported from: RUN/package in a submitted job."""


@dataclass(frozen=True)
class Part:
    """A folder to send: `member` of `source` ("." = all of it)."""

    name: str
    source: Path
    member: str = "."


def parts(what: str) -> list[Part]:
    """What `cluster.broadcast=what` sends. Raises ConfigError for a Python that is in no environment of its own."""
    package = Part("package", PACKAGE_ROOT, "gyre_hpc")
    if what != "environment":
        return [package]
    prefix = Path(sys.prefix)
    if sys.prefix == sys.base_prefix and not (prefix / "conda-meta").is_dir():
        raise ConfigError(
            f"cluster.broadcast=environment: {sys.executable} is in no virtual or conda environment",
            fix="make one (tools/setup_venv.sh), or set cluster.broadcast=package",
        )
    return [package, Part("environment", prefix)]


def digest(part: Part) -> str:
    """Of relative name, size and time of every file: what changes when a package is installed."""
    found = hashlib.sha256()
    for line in sorted(_listing(os.fspath(part.source / part.member))):
        found.update(os.fsencode(line))
    return found.hexdigest()[:12]


def _listing(top: str) -> Iterator[str]:
    folders = [top]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.extend([entry.path] * (entry.name != "__pycache__"))
                    continue
                about = entry.stat(follow_symlinks=False)
                yield f"{entry.path.removeprefix(top)}\0{about.st_size}\0{about.st_mtime_ns}\n"


def pack(part: Part, folder: Path) -> Path:
    """The archive of `part` in `folder`, made unless it is there. Raises StorageFull, GyreError with tar's words."""
    archive = folder / f"{part.name}-{digest(part)}.tar"
    if archive.is_file():
        return archive
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{part.name}-*"):
        old.unlink()
    partial = archive.with_suffix(".partial")
    command = ["tar", "-cf", str(partial), "-C", str(part.source), part.member]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        partial.unlink(missing_ok=True)
        raise GyreError(f"{archive}: tar has not ended after {LIMIT_S:g} s") from error
    if done.returncode > TAR_CHANGED:
        partial.unlink(missing_ok=True)
        raise StorageFull(
            f"{archive}: tar: {done.stderr.strip()[-300:]}", fix="free space, or cluster.broadcast=none"
        )
    partial.rename(archive)
    return archive


def sbcast_command(job: str, archive: Path, sent: Path) -> list[str]:
    """Send `archive` to each node of a job (of a component, by its own id)."""
    return ["sbcast", f"--jobid={job}", "--force", str(archive), str(sent)]


async def broadcast(launcher: object, cluster: ClusterConfig, layout: RunLayout) -> None:
    """Give `launcher` its node copies. Whatever goes wrong is logged, and steps run from the shared folders."""
    if cluster.broadcast == "none" or not isinstance(launcher, SlurmLauncher):
        return
    try:
        launcher.copy = await _broadcast(launcher, cluster, layout)
    except (GyreError, OSError) as error:
        log.warning("cluster.broadcast=%s: all steps run from shared folders: %s", cluster.broadcast, error)


async def _broadcast(launcher: SlurmLauncher, cluster: ClusterConfig, layout: RunLayout) -> NodeCopy:
    began, sent = time.monotonic(), parts(cluster.broadcast)
    archives = [await asyncio.to_thread(pack, part, layout.broadcast) for part in sent]
    packed = time.monotonic()
    home = scratch.job_folder(cluster.scratch, layout)
    log_file = layout.broadcast / "log"
    log_file.unlink(missing_ok=True)
    make = ["/bin/sh", "-c", 'mkdir -m 700 "$0" 2>/dev/null; true', str(home)]
    await launcher.everywhere(make, log_file)
    for archive in archives:
        await _send(launcher, archive, home / archive.name)
    arrived = time.monotonic()
    targets = [home / archive.stem for archive in archives]
    words = [
        word
        for archive, to in zip(archives, targets, strict=True)
        for word in (archive, home / archive.name, to)
    ]
    command = [sys.executable, "-m", unpack.__name__, *map(str, words)]
    await launcher.everywhere(command, log_file, LIMIT_S)
    nodes = _having(launcher.node_names, log_file.read_text(errors="replace"))
    log.info(
        "cluster.broadcast=%s: %.1f MiB to %d of %d nodes: packed in %.1f s, sent in %.1f s, unpacked in %.1f s",
        cluster.broadcast,
        sum(archive.stat().st_size for archive in archives) / 2**20,
        len(nodes),
        len(launcher.node_names),
        packed - began,
        arrived - packed,
        time.monotonic() - arrived,
    )
    python = targets[1] / Path(sys.executable).relative_to(sys.prefix) if len(targets) > 1 else None
    return NodeCopy(nodes, targets[0], layout.package, python)


def _having(names: Sequence[str], said: str) -> frozenset[str]:
    """Nodes that have the copy; each of the others is named."""
    outcomes = read_outcomes(said)
    for name in names:
        if why := outcomes.get(name, "it did not say that it has unpacked it"):
            log.warning("cluster.broadcast: steps on %s run from shared folders: %s", name, why)
    return frozenset(name for name in names if outcomes.get(name) == "")


async def _send(launcher: SlurmLauncher, archive: Path, sent: Path) -> None:
    for job in launcher.jobs:
        spec = ProcessSpec("sbcast", sbcast_command(job, archive, sent), log=archive.with_name("sbcast.log"))
        try:
            process = LocalProcess(spec.name, spawn(spec))
        except MissingInput as error:
            log.warning("%s: nodes read %s instead", error.message, archive)
            return
        try:
            async with asyncio.timeout(LIMIT_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
        if code != 0:
            log.warning(
                "sbcast to job %s exited with %d, see %s: nodes read %s instead", job, code, spec.log, archive
            )
