"""What a run asks of Slurm: components of equal nodes, worked out from `cluster` (pure; called at submission and in tests).

Flat: one component whose every node holds `job.cells_per_node` cells and room for the services (controller, gateway,
runner, processor) beside them. Het: component 0 holds the services, component 1 the cells; Slurm gives components
different nodes. The services' room is worked out of their sizes, or given and checked against them. What a lost node would do is part of the answer: refused under `cluster.survive_node_loss` where Slurm
ends the whole job, named as a warning where the run goes on without it or cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gyre_hpc.config_cluster import CellConfig, ClusterConfig
from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.nodes.gres import times
from gyre_hpc.launch.nodes.placement import megabytes

SERVICES: Final = "controller, gateway, runner, processor"
EXTERNAL: Final = ("gateway", "runner")
"""Services that lie in a job of their own under `cluster.runners=external`."""
HET_LEADER_NODES: Final = 2
"""A component of one node that loses it ends all components, whatever --no-kill says (Slurm's _het_job_on_node)."""


@dataclass(frozen=True)
class Component:
    """`nodes` nodes, each of this size. `gres` is per node, "" = none; `mem_mb` in MiB."""

    holds: str
    nodes: int
    cpus: int
    mem_mb: int
    gres: str = ""
    partition: str = ""
    constraint: str = ""
    switches: str = ""

    def __str__(self) -> str:
        gres = f", {self.gres}" if self.gres else ""
        return f"{self.nodes} nodes x {self.cpus} CPUs, {self.mem_mb} MiB{gres}: {self.holds}"


@dataclass(frozen=True)
class JobRequest:
    """Components, the batch step's first, and what the loss of a node would end."""

    components: tuple[Component, ...]
    warnings: tuple[str, ...]


def request_for(cluster: ClusterConfig) -> JobRequest:
    """The request of this cluster section. Raises ConfigError for keys that contradict each other."""
    if cluster.kind != "slurm":
        raise ConfigError(f"cluster.kind={cluster.kind} is not run by Slurm", fix="add cluster=slurm")
    components = _het(cluster) if cluster.layout == "het" else (_flat(cluster),)
    return JobRequest(components, tuple(_lost_nodes(cluster, components)))


def _flat(cluster: ClusterConfig) -> Component:
    cells = request_for_cells(cluster)
    cpus, mem_mb = service_room(cluster, cells.nodes)
    return Component(
        holds=f"{services_of(cluster)}; {cells.holds}",
        nodes=cells.nodes,
        cpus=cells.cpus + cpus,
        mem_mb=cells.mem_mb + mem_mb,
        gres=cells.gres,
        partition=cells.partition,
        constraint=cells.constraint,
        switches=cells.switches,
    )


def _het(cluster: ClusterConfig) -> tuple[Component, ...]:
    job = cluster.job
    cpus, mem_mb = service_room(cluster, job.service_nodes)
    services = Component(
        holds=services_of(cluster),
        nodes=job.service_nodes,
        cpus=cpus,
        mem_mb=mem_mb,
        partition=job.service_partition or job.partition,
    )
    return services, request_for_cells(cluster)


def services_of(cluster: ClusterConfig) -> str:
    """The processes beside the cells that the run's own job holds."""
    return "controller, processor" if cluster.runners == "external" else SERVICES


def service_room(cluster: ClusterConfig, nodes: int) -> tuple[int, int]:
    """CPUs and MiB per node for the services on `nodes` nodes. Raises ConfigError where what is given holds less."""
    job, sizes = cluster.job, cluster.service
    elsewhere = EXTERNAL if cluster.runners == "external" else ()
    each = {
        name: (size.cpus, megabytes(size.mem)) for name, size in vars(sizes).items() if name not in elsewhere
    }
    needs_cpus, needs_mem = spread(list(each.values()), nodes)
    cpus = job.service_cpus or needs_cpus
    mem_mb = megabytes(job.service_mem) if job.service_mem else needs_mem
    widest = max(each, key=lambda name: each[name][0])
    if each[widest][0] > cpus:
        raise ConfigError(
            f"cluster.job.service_cpus={cpus}, but cluster.service.{widest}.cpus={each[widest][0]}",
            fix=f"set cluster.job.service_cpus={needs_cpus}, or 0 to have it worked out",
        )
    if needs_mem > mem_mb:
        told = ", ".join(f"{name} {size[1]} MiB" for name, size in each.items())
        raise ConfigError(
            f"cluster.job.service_mem={job.service_mem}, but {told} come to {needs_mem} MiB per node",
            fix=f"set cluster.job.service_mem={needs_mem}M, or leave it empty to have it worked out",
        )
    return cpus, mem_mb


def spread(sizes: Sequence[tuple[int, int]], nodes: int) -> tuple[int, int]:
    """The most that lies on one of `nodes` nodes when services (CPUs, MiB) are spread, the largest first."""
    loads = [(0, 0)] * nodes
    for cpus, mem_mb in sorted(sizes, key=lambda size: (size[1], size[0]), reverse=True):
        index = min(range(nodes), key=lambda index: (loads[index][1], loads[index][0]))
        loads[index] = loads[index][0] + cpus, loads[index][1] + mem_mb
    return max(cpus for cpus, _ in loads), max(mem_mb for _, mem_mb in loads)


def request_for_cells(cluster: ClusterConfig) -> Component:
    """Room for the cells alone. Raises ConfigError for keys that contradict each other."""
    cell, job = cluster.cell, cluster.job
    per_node = min(job.cells_per_node, cluster.cells)
    if cell.nodes > 1 and job.cells_per_node > 1:
        raise ConfigError(
            f"cluster.job.cells_per_node={job.cells_per_node}: a cell has cluster.cell.nodes={cell.nodes} nodes",
            fix="set cluster.job.cells_per_node=1",
        )
    if cell.ranks % cell.nodes:
        raise ConfigError(
            f"cluster.cell.ranks={cell.ranks} do not spread over cluster.cell.nodes={cell.nodes}",
            fix=f"set cluster.cell.ranks={cell.nodes * -(-cell.ranks // cell.nodes)}",
        )
    return Component(
        holds=f"{cluster.cells} cells" + (f", {per_node} per node" if per_node > 1 else ""),
        nodes=-(-cluster.cells // per_node) * cell.nodes,
        cpus=per_node * cpus_of(cell),
        mem_mb=per_node * megabytes(cell.mem),
        gres=times(cell.gres, per_node),
        partition=job.partition,
        constraint=job.constraint,
        switches=job.switches,
    )


def cpus_of(cell: CellConfig) -> int:
    """CPUs a cell takes on each of its nodes."""
    return cell.ranks // cell.nodes * cell.cpus_per_rank


def _lost_nodes(cluster: ClusterConfig, components: tuple[Component, ...]) -> list[str]:
    nodes = components[0].nodes
    if cluster.layout == "het" and nodes < HET_LEADER_NODES:
        reason = (
            f"cluster.layout=het with cluster.job.service_nodes={nodes}: Slurm ends all components when a node of"
            " any of them is lost"
        )
        if cluster.survive_node_loss:
            raise ConfigError(
                reason,
                fix=f"set cluster.job.service_nodes={HET_LEADER_NODES}, cluster.layout=flat, or"
                " cluster.survive_node_loss=false",
            )
        return [reason]
    if len(components) == 1 and nodes == 1:
        return ["one node: its loss ends the run; go on with gyre submit resume=RUN"]
    return [
        "the batch node: the run stops there. Its other processes wait cluster.orphan_grace_s="
        f"{cluster.orphan_grace_s:g} and for Slurm to lose the node, then"
        + (" requeue the job, which goes on" if cluster.job.requeue else " cancel the job")
    ]
