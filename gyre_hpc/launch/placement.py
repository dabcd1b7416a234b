"""Which nodes of the allocation a step runs on: pure bookkeeping of CPUs and memory per node.

A step goes to nodes that have room for it, of those to the ones with most free CPUs (ties: last node of the allocation
first, because the first carries the controller). It gets its CPUs and memory to itself (`--exact`) if they are free; else it shares (`--overlap`) and takes
nothing from those that come after it. A service (a process beside the cells) counts as free only what the planned cells and
the controller leave over, so that services, which start first, take no cell's place. In a heterogeneous job cells go to the
components after the first, services to the first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gyre_hpc.errors import ConfigError
from gyre_hpc.launch.plan import ProcessSpec

DEFAULT_MEM_MB: Final = 1024
"""Memory of a step whose spec names none."""
_UNITS: Final = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class Node:
    """Allocated size of one node. `mem_mb` None: the site does not manage memory. `group`: its component, None: flat."""

    name: str
    cpus: int
    mem_mb: int | None
    group: int | None = None


@dataclass(frozen=True)
class Placement:
    """Where one step runs. `exact` False: it shares CPUs with other steps."""

    nodes: tuple[str, ...]
    cpus_per_node: int
    mem_mb: int
    exact: bool
    group: int | None = None
    service: bool = False


def megabytes(mem: str) -> int:
    """Slurm's memory notation ("512M", "2G", "2048") in MiB."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", mem.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"memory '{mem}' is not a number with K, M, G or T", fix='write it like "2G"')
    return max(1, round(int(match[1]) * _UNITS[match[2].upper() or "M"]))


def cpus_per_node(text: str, nodes: int) -> list[int]:
    """SLURM_JOB_CPUS_PER_NODE, for example "8(x3),4"."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(
                f"SLURM_JOB_CPUS_PER_NODE='{text}' cannot be read", fix="run inside an sbatch job"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes:
        raise ConfigError(f"SLURM_JOB_CPUS_PER_NODE='{text}' names {len(counts)} nodes, the job has {nodes}")
    return counts


def place(
    spec: ProcessSpec,
    nodes: Sequence[Node],
    running: Iterable[Placement],
    planned: Sequence[Placement] = (),
) -> Placement:
    """Choose nodes for `spec` beside the running steps; a service also beside those planned.

    Raises ConfigError if the job is too small.
    """
    cpus = spec.ranks // spec.nodes * spec.cpus_per_rank
    mem_mb = megabytes(spec.mem) if spec.mem else DEFAULT_MEM_MB
    open_to = [node for node in nodes if node.group is None or (node.group == 0) == spec.service]
    large = [node for node in open_to if node.cpus >= cpus and (node.mem_mb is None or node.mem_mb >= mem_mb)]
    if spec.nodes > len(large):
        size = f"cluster.service.{spec.name.partition('-')[0]}" if spec.service else "cluster.cell"
        raise ConfigError(
            f"{spec.name} needs {spec.nodes} nodes with {cpus} CPUs and {mem_mb} MiB; of the job's {len(open_to)}"
            f" nodes for it {len(large)} are that large",
            fix=f"raise --nodes, --cpus-per-task or --mem of the job, or lower {size}",
        )
    steps = list(running)
    free = _room(nodes, steps, planned) if spec.service else _free(nodes, steps)
    load = Counter(name for step in steps for name in step.nodes if not step.exact)

    def rank(index: int) -> tuple[bool, int, int]:
        name = large[index].name
        return not _fits(free[name], cpus, mem_mb), load[name] - free[name][0], -index

    chosen = [large[index] for index in sorted(range(len(large)), key=rank)[: spec.nodes]]
    exact = all(_fits(free[node.name], cpus, mem_mb) for node in chosen)
    names = tuple(sorted(node.name for node in chosen))
    return Placement(names, cpus, mem_mb, exact, chosen[0].group, spec.service)


def _free(nodes: Sequence[Node], running: Iterable[Placement]) -> Mapping[str, tuple[int, int | None]]:
    free: dict[str, tuple[int, int | None]] = {node.name: (node.cpus, node.mem_mb) for node in nodes}
    for step in running:
        if step.exact:
            for name in step.nodes:
                if name in free:
                    cpus, mem = free[name]
                    free[name] = (cpus - step.cpus_per_node, None if mem is None else mem - step.mem_mb)
    return free


def _room(
    nodes: Sequence[Node], running: Sequence[Placement], planned: Sequence[Placement]
) -> dict[str, tuple[int, int | None]]:
    """What a service may have of each node: the rest beside the other services and the cells, planned or running."""
    services = [step for step in running if step.service]
    planned_free, running_free = _free(nodes, [*services, *planned]), _free(nodes, running)
    return {name: _less(free, running_free[name]) for name, free in planned_free.items()}


def _less(a: tuple[int, int | None], b: tuple[int, int | None]) -> tuple[int, int | None]:
    """The lesser of each; both know the memory or neither does."""
    return min(a[0], b[0]), None if a[1] is None or b[1] is None else min(a[1], b[1])


def _fits(free: tuple[int, int | None], cpus: int, mem_mb: int) -> bool:
    return free[0] >= cpus and (free[1] is None or free[1] >= mem_mb)
