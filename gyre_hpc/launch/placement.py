"""Which nodes of the allocation a step runs on: pure bookkeeping of CPUs and memory per node.

A step goes to the nodes with most free CPUs (ties: last node of the allocation first, because the first carries the
controller). A cell, whose spec names its memory, gets its CPUs to itself (`--exact`) if they are free; a controller-side
process, or a cell that fits nowhere, shares (`--overlap`) and takes nothing from those that come after it. In a
heterogeneous job cells go to the components after the first, everything else to the first.
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
"""Memory of a step whose spec names none: a controller-side process."""
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


def place(spec: ProcessSpec, nodes: Sequence[Node], running: Iterable[Placement]) -> Placement:
    """Choose nodes for `spec` beside the running steps. Raises ConfigError if the job is too small."""
    cpus = spec.ranks // spec.nodes * spec.cpus_per_rank
    mem_mb = megabytes(spec.mem) if spec.mem else DEFAULT_MEM_MB
    open_to = [node for node in nodes if node.group is None or (node.group > 0) == bool(spec.mem)]
    large = [node for node in open_to if node.cpus >= cpus and (node.mem_mb is None or node.mem_mb >= mem_mb)]
    if spec.nodes > len(large):
        raise ConfigError(
            f"{spec.name} needs {spec.nodes} nodes with {cpus} CPUs and {mem_mb} MiB; of the job's {len(open_to)}"
            f" nodes for it {len(large)} are that large",
            fix="raise --nodes, --cpus-per-task or --mem of the job, or lower cluster.cell.cpus_per_rank or .mem",
        )
    steps = list(running)
    free = _free(nodes, steps)
    load = Counter(name for step in steps for name in step.nodes if not step.exact)
    order = sorted(
        range(len(large)), key=lambda index: (load[large[index].name] - free[large[index].name][0], -index)
    )
    chosen = [large[index] for index in order[: spec.nodes]]
    exact = bool(spec.mem) and all(_fits(free[node.name], cpus, mem_mb) for node in chosen)
    return Placement(tuple(sorted(node.name for node in chosen)), cpus, mem_mb, exact, chosen[0].group)


def _free(nodes: Sequence[Node], running: Iterable[Placement]) -> Mapping[str, tuple[int, int | None]]:
    free: dict[str, tuple[int, int | None]] = {node.name: (node.cpus, node.mem_mb) for node in nodes}
    for step in running:
        if step.exact:
            for name in step.nodes:
                if name in free:
                    cpus, mem = free[name]
                    free[name] = (cpus - step.cpus_per_node, None if mem is None else mem - step.mem_mb)
    return free


def _fits(free: tuple[int, int | None], cpus: int, mem_mb: int) -> bool:
    return free[0] >= cpus and (free[1] is None or free[1] >= mem_mb)
