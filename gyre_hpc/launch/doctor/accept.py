"""The acceptance job (slurm/accept.sbatch): what only several nodes of an allocation can tell, into `site.json`.

`accept` is the batch step. It starts one task per node (`gyre doctor --inside`), which meet in a shared folder
(`accept_node`), then a step of two tasks that pull regions (`accept_regions`) and one of two MPI tasks; all with
deadlines. A task that says nothing is a fault of its node.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.errors import ConfigError, MissingInput
from gyre_hpc.launch.doctor.accept_node import Met, Report, read_reports
from gyre_hpc.launch.doctor.accept_regions import (
    OWNER,
    PULLER,
    Measured,
    choose,
    judge_regions,
    read_measured,
)
from gyre_hpc.launch.doctor.ask import Answer, ask
from gyre_hpc.launch.doctor.machine import mpi_library
from gyre_hpc.launch.doctor.probes import World
from gyre_hpc.launch.doctor.site import EVERY, Finding, Site, fault, ok, site_of, warning, write_site
from gyre_hpc.launch.doctor.slurm import plugins_of, wanted_plugins
from gyre_hpc.launch.job.allocation import read_allocation
from gyre_hpc.layout import RunLayout
from gyre_hpc.transport.mpi.host import socket_path
from gyre_hpc.transport.mpi.pair import endpoint_arguments
from gyre_hpc.transport.regions import run_key
from gyre_hpc.transport.rendezvous import write_secret

log = logging.getLogger(__name__)

NODES_S: Final = 180.0
"""The probes of a node (60 s), then its meeting with the others."""
WORLD_S: Final = 60.0
REGIONS_S: Final = 300.0
"""Two nodes meet (60 s), endpoints come up (60 s), then six pulls by each way; the first that takes 20 s ends its way."""
SHOWN: Final = 4
"""Pairs in trouble that are named in one finding."""
_FOLDER: Final = "see the job's log; name a folder that all nodes see: sbatch -N2 slurm/accept.sbatch FOLDER"
SKEW_S: Final = 1.0
"""Heartbeats are judged by one clock each; people compare the times in logs of several nodes."""


def accept(folder: Path, env: Mapping[str, str] = os.environ) -> Site:
    """Look at every node of the allocation this process is the batch step of, and write `folder/site.json`."""
    allocation = read_allocation(env)
    if allocation is None:
        raise ConfigError(
            "gyre doctor --accept runs inside a job", fix="sbatch -N2 slurm/accept.sbatch FOLDER"
        )
    if len(allocation.jobs) > 1:
        raise ConfigError(
            f"job {allocation.jobs[0]} is heterogeneous: the acceptance job looks at one kind of nodes at a time",
            fix="submit it once for each partition: sbatch -N2 -p PARTITION slurm/accept.sbatch FOLDER",
        )
    names = [node.name for node in allocation.nodes]
    meeting = _made(folder.absolute() / f".accept-{allocation.jobs[0]}")
    try:
        inside = [sys.executable, "-m", "gyre_hpc.cli", "doctor", "--inside", str(meeting), "--nodes", *names]
        step = ask(*srun(allocation.jobs[0], len(names), "none"), *inside, deadline_s=NODES_S)
        if not step.good:
            log.error("%s", step.err)
        found = judge_nodes(names, read_reports(meeting), step)
        measured, regions = _regions(allocation.jobs[0], names, meeting)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    found += [*regions, *_mpi(allocation.jobs[0], min(2, len(names)))]
    site = site_of(found, choose(measured))
    write_site(site, folder)
    return site


def _regions(job: str, names: Sequence[str], meeting: Path) -> tuple[Measured | None, list[Finding]]:
    """Pulls between the first two nodes, one task on each."""
    if len(names) < 2:
        return None, []
    key, plugin = run_key(write_secret(RunLayout(meeting))), _plugin()
    task = [sys.executable, "-m", "gyre_hpc.launch.doctor.accept_regions", str(meeting), *names[:2]]
    steps = [[*srun(job, 2, "none"), f"--nodelist={names[0]},{names[1]}", *task]]
    if plugin:
        steps[0].append("--mpi")
        steps += [
            _endpoint(job, meeting, key, plugin, *pair) for pair in zip((OWNER, PULLER), names, strict=False)
        ]
    with ThreadPoolExecutor(len(steps)) as pool:
        step, *endpoints = pool.map(lambda argv: ask(*argv, deadline_s=REGIONS_S), steps)
    for answer in (step, *endpoints):
        if answer.err.strip():
            log.warning("%s", answer.err)
    measured = read_measured(meeting)
    return measured, judge_regions(measured, step, names)


def _made(meeting: Path) -> Path:
    try:
        meeting.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "name a folder you may write to: sbatch -N2 slurm/accept.sbatch FOLDER"
        raise MissingInput(f"{meeting}: {error.strerror}", fix=fix) from error
    return meeting


def srun(job: str, nodes: int, mpi: str) -> list[str]:
    """The step of one task on each of `nodes` nodes; memory and devices are the job's."""
    return [
        "srun",
        f"--jobid={job}",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--mem=0",
        "--cpu-bind=none",
        f"--mpi={mpi}",
        "--kill-on-bad-exit=0",
        "--overlap",
    ]


def judge_nodes(names: Sequence[str], reports: Mapping[str, Report], step: Answer) -> list[Finding]:
    """Findings by node, then those of pairs; a node without a report is a fault."""
    silent = [
        _of(name, fault("node", f"no report: {step.why}", _FOLDER)) for name in names if name not in reports
    ]
    return [*silent, *_local(reports), *(judge_pairs(names, reports) if reports else [])]


def _local(reports: Mapping[str, Report]) -> list[Finding]:
    """What nodes found of themselves; where several found the same it is one finding."""
    nodes: dict[Finding, list[str]] = {}
    for name, report in reports.items():
        for finding in report.findings:
            nodes.setdefault(finding, []).append(name)
    every = len(reports)
    return [
        _of(EVERY if len(where) == every else ",".join(where), finding) for finding, where in nodes.items()
    ]


def _of(node: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, node=node)


def judge_pairs(names: Sequence[str], reports: Mapping[str, Report]) -> list[Finding]:
    """Whether each node saw and reached each other one. The first few pairs that did not are named."""
    if len(names) < 2:
        return [warning("network", "the job has one node", "sbatch -N2 slurm/accept.sbatch FOLDER")]
    met = {(a, b): other for a, report in reports.items() for b, other in report.met.items()}
    seen = {pair: other for pair, other in met.items() if not other.unseen}
    reached = {pair: other for pair, other in seen.items() if not other.unreached}
    homeless = [f"{name}: {report.address}" for name, report in reports.items() if not report.met]
    return [
        _shared([f"{b} on {a}: {other.unseen}" for (a, b), other in met.items() if other.unseen], len(seen)),
        _network(
            homeless + [f"{a} to {b}: {o.unreached}" for (a, b), o in seen.items() if o.unreached],
            len(reached),
        ),
        *_clocks(reached),
    ]


def _some(troubles: Sequence[str]) -> str:
    return "; ".join(troubles[:SHOWN]) + (
        f"; and {len(troubles) - SHOWN} more" if len(troubles) > SHOWN else ""
    )


def _shared(troubles: Sequence[str], good: int) -> Finding:
    if troubles or not good:
        return fault("shared folder", _some(troubles) or "no node saw another's files", _FOLDER)
    return ok("shared folder", f"renamed and synced files seen in order, {good} ways")


def _network(troubles: Sequence[str], good: int) -> Finding:
    if troubles or not good:
        fix = "make each node's name resolve to an address other nodes reach, or set cluster.host; open its ports"
        return fault("network", _some(troubles) or "no node reached another", fix)
    return ok("network", f"each node reached the others' cluster.host=auto address, {good} ways")


def _clocks(reached: Mapping[tuple[str, str], Met]) -> list[Finding]:
    """The pair whose clocks surely differ most."""
    if not reached:
        return []
    (a, b), worst = max(reached.items(), key=lambda item: abs(item[1].skew_s) - item[1].error_s)
    text = f"at most {abs(worst.skew_s):.3f} s apart ({a}, {b}), known to {worst.error_s:.3f} s"
    if abs(worst.skew_s) - worst.error_s > SKEW_S:
        return [warning("clocks", text, "ask the site to run NTP on its nodes: times in logs do not compare")]
    return [ok("clocks", text)]


def _endpoint(job: str, meeting: Path, key: str, plugin: str, name: str, node: str) -> list[str]:
    """The step of one MPI endpoint, beside the task that listens for it."""
    arguments = endpoint_arguments(meeting, name, socket_path(key, name), plugin)
    return [*srun(job, 1, plugin), f"--nodelist={node}", sys.executable, *arguments]


def _plugin() -> str:
    """The plugin with which srun starts the MPI library here; "" without one."""
    library = mpi_library()
    if isinstance(library, str):
        return ""
    plugins = plugins_of(ask("srun", "--mpi=list"))
    return next((name for name in wanted_plugins(library) if name in plugins), "")


def _mpi(job: str, tasks: int) -> list[Finding]:
    library = mpi_library()
    if isinstance(library, str):
        return [ok("mpi world", f"{library}; runs use sockets")]
    plugins = plugins_of(ask("srun", "--mpi=list"))
    plugin = next((name for name in wanted_plugins(library) if name in plugins), "")
    if not plugin:
        return [
            warning("mpi world", f"{library.library}: no plugin of srun fits", "see gyre doctor, mpi library")
        ]
    world = [sys.executable, "-m", "gyre_hpc.launch.doctor.probes", "world"]
    return [judge_world(ask(*srun(job, tasks, plugin), *world, deadline_s=WORLD_S), tasks, plugin)]


def judge_world(step: Answer, tasks: int, plugin: str) -> Finding:
    """A library that srun cannot start as one world silently runs as many worlds of one."""
    said = f"srun --mpi={plugin} of {tasks} tasks"
    fix = "runs use sockets and do not need it; for MPI choose a library that srun starts (docs/slurm.md)"
    if not step.good:
        return warning("mpi world", f"{said}: {step.why}", fix)
    try:
        worlds = [
            msgspec.json.decode(line, type=World) for line in step.out.split("\n") if line.startswith("{")
        ]
    except msgspec.DecodeError as error:
        return warning("mpi world", f"{said}: unreadable answer: {error}", fix)
    sizes = sorted(world.size for world in worlds)
    if sizes != [tasks] * tasks:
        return warning("mpi world", f"{said}: worlds of {sizes} instead of {tasks}", fix)
    return ok("mpi world", f"{said}: one world of {tasks}")
