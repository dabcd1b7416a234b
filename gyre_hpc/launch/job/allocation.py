"""The allocation this process runs in, and whether it holds what the configuration asks for.

Read from the environment Slurm gives the batch step; a heterogeneous job has one set of variables per component. The
controller compares before it starts anything: a job script edited by hand and a configuration easily disagree, and a
cell that must share what it should own only looks slow.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gyre_hpc.config_cluster import CellConfig, ClusterConfig
from gyre_hpc.errors import ConfigError, NoRoom
from gyre_hpc.launch.commands import SlurmCommandFailed, hostnames, query
from gyre_hpc.launch.job.request import cpus_of, service_room
from gyre_hpc.launch.nodes.gres import gres_counts, held
from gyre_hpc.launch.nodes.placement import Node, Placement, cpus_per_node, megabytes, place
from gyre_hpc.launch.plan import ProcessSpec


@dataclass(frozen=True)
class Allocation:
    """`jobs`: Slurm's id of each component, the batch step's first; a flat job has one. Nodes in Slurm's order."""

    jobs: tuple[str, ...]
    nodes: tuple[Node, ...]


def read_allocation(env: Mapping[str, str]) -> Allocation | None:
    """The allocation `env` tells of; None outside a job. Raises ConfigError for what cannot be read."""
    if not env.get("SLURM_JOB_ID") or not env.get("SLURM_JOB_NODELIST"):
        return None
    components = int(env.get("SLURM_HET_SIZE", "0"))
    if components == 0:
        return Allocation((env["SLURM_JOB_ID"],), tuple(_nodes(env, "", None)))
    suffixes = [f"_HET_GROUP_{group}" for group in range(components)]
    nodes = [node for group, suffix in enumerate(suffixes) for node in _nodes(env, suffix, group)]
    return Allocation(tuple(env[f"SLURM_JOB_ID{suffix}"] for suffix in suffixes), tuple(nodes))


def _nodes(env: Mapping[str, str], suffix: str, group: int | None) -> list[Node]:
    names = hostnames(env[f"SLURM_JOB_NODELIST{suffix}"])
    cpus = cpus_per_node(env.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", ""), len(names))
    return [
        Node(name, count, _memory_mb(env, suffix, count), group)
        for name, count in zip(names, cpus, strict=True)
    ]


def _memory_mb(env: Mapping[str, str], suffix: str, cpus: int) -> int | None:
    if per_node := env.get(f"SLURM_MEM_PER_NODE{suffix}"):
        return int(per_node)
    if per_cpu := env.get(f"SLURM_MEM_PER_CPU{suffix}"):
        return int(per_cpu) * cpus
    return None


def read_gres(allocation: Allocation) -> dict[str, str]:
    """Generic resources per node, by node name; empty where Slurm does not say (which proves nothing)."""
    try:
        lines = query("squeue", "-h", "-j", allocation.jobs[0], "-o", "%b").splitlines()
    except SlurmCommandFailed:
        return {}
    if len(lines) != len(allocation.jobs):
        return {}
    return {node.name: lines[node.group or 0].strip().replace("N/A", "") for node in allocation.nodes}


def check_allocation(cluster: ClusterConfig, allocation: Allocation, gres: Mapping[str, str]) -> None:
    """Raise ConfigError with both sides unless every cell has its own CPUs, memory and `gres` (per node, as far as known)."""
    fault = _layout_fault(cluster, allocation) or _cells_fault(cluster, allocation.nodes, gres)
    if fault:
        raise ConfigError(
            f"configuration and allocation do not agree: {fault}\n"
            f"  configuration: {_asked(cluster)}\n  allocation: {_given(allocation, gres)}",
            fix="submit with gyre submit, which plans the job from the configuration; or raise --nodes, --cpus-per-task,"
            " --mem or --gres of the script, or lower cluster.cells or cluster.cell",
        )


def _layout_fault(cluster: ClusterConfig, allocation: Allocation) -> str:
    layout = "het" if len(allocation.jobs) > 1 else "flat"
    return "" if layout == cluster.layout else f"cluster.layout={cluster.layout}, the job is {layout}"


def planned_steps(cluster: ClusterConfig, nodes: Sequence[Node]) -> list[Placement]:
    """Where the controller is and all cells will be: what the services may not take. Cells that fit nowhere are left out."""
    steps: list[Placement] = []
    with contextlib.suppress(NoRoom):
        for index in range(cluster.cells):
            steps.append(place(_cell(cluster.cell, index), nodes, steps))
    own, first = cluster.service.controller, nodes[0]
    mem_mb = megabytes(own.mem)
    return [*steps, Placement((first.name,), own.cpus, mem_mb, True, first.group, service=True)]


def with_room_kept(cluster: ClusterConfig, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """`nodes`, each keeping from cells what a flat job is planned to have for services on it.

    As they are in a heterogeneous job, and where that leaves a cell without room: in a job whose script asks for less.
    """
    try:
        cpus, mem_mb = service_room(cluster, len(nodes))
        keeping = tuple(replace(node, kept_cpus=cpus, kept_mb=mem_mb) for node in nodes)
        _cells(cluster, keeping)
    except (NoRoom, ConfigError):
        return tuple(nodes)
    return tuple(nodes) if any(node.group is not None for node in nodes) else keeping


def _cells(cluster: ClusterConfig, nodes: Sequence[Node]) -> list[Placement]:
    """Where all cells would go. Raises NoRoom."""
    steps: list[Placement] = []
    for index in range(cluster.cells):
        steps.append(place(_cell(cluster.cell, index), nodes, steps))
    return steps


def _cell(cell: CellConfig, index: int) -> ProcessSpec:
    return ProcessSpec(
        name=f"cell-{index}",
        argv=["cell"],
        nodes=cell.nodes,
        ranks=cell.ranks,
        cpus_per_rank=cell.cpus_per_rank,
        mem=cell.mem,
    )


def _cells_fault(cluster: ClusterConfig, nodes: Sequence[Node], gres: Mapping[str, str]) -> str:
    """The first cell that would have to share, "" if none would."""
    try:
        steps = _cells(cluster, nodes)
    except NoRoom as error:
        return error.message
    return _gres_fault(cluster.cell.gres, Counter(name for step in steps for name in step.nodes), gres)


def _gres_fault(wanted: str, cells: Mapping[str, int], gres: Mapping[str, str]) -> str:
    for node, count in cells.items():
        for name, each in gres_counts(wanted).items():
            if node in gres and each * count > held(gres[node], name):
                return f"{count} cells on {node} need {name}:{each * count}, it has {name}:{held(gres[node], name)}"
    return ""


def _asked(cluster: ClusterConfig) -> str:
    cell = cluster.cell
    return (
        f"cluster.layout={cluster.layout}, {cluster.cells} cells, each {cell.nodes} nodes x {cpus_of(cell)} CPUs,"
        f" {megabytes(cell.mem)} MiB, gres {cell.gres or 'none'}"
    )


def _given(allocation: Allocation, gres: Mapping[str, str]) -> str:
    return f"job {allocation.jobs[0]}: " + "; ".join(
        f"{node.name}{'' if node.group is None else f' (component {node.group})'} {node.cpus} CPUs,"
        f" {'?' if node.mem_mb is None else node.mem_mb} MiB, gres {gres.get(node.name, '?') or 'none'}"
        for node in allocation.nodes
    )
