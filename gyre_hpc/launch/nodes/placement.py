"""Which nodes of the allocation a step runs on: pure bookkeeping of CPUs, memory and devices per node.

A step goes to nodes that have room for it, of those to the ones with most free CPUs (ties: last node of the allocation
first, because the first carries the controller); one of `spec.avoid` comes last, one of `spec.never` not at all, for a
service only where there is no other: the run cannot do without it. A cell has
its CPUs, memory and devices to itself (`--exact`) or does not start (NoRoom): a cell that shares makes others slow, and
nobody is told. A service (a process beside the cells) has its own if they are free, else it shares (`--overlap`) and takes
nothing from those that come after it. It counts as free only what the planned cells and the controller leave over, and a
cell only what the node does not keep for services, so that neither takes the other's place, whoever starts first. In a
heterogeneous job cells go to the components after the first, services to the first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Final

from gyre_hpc.errors import ConfigError, NoRoom
from gyre_hpc.launch.nodes.gres import gres_counts, held
from gyre_hpc.launch.plan import ProcessSpec

DEFAULT_MEM_MB: Final = 1024
"""Memory of a step whose spec names none."""
_UNITS: Final = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class Node:
    """Allocated size of one node. `mem_mb`, `gres` None: not managed, or not told. `group`: its component, None: flat.

    `kept_cpus`, `kept_mb`: what of it no cell may take, because services need it.
    """

    name: str
    cpus: int
    mem_mb: int | None
    group: int | None = None
    gres: str | None = None
    kept_cpus: int = 0
    kept_mb: int = 0


@dataclass(frozen=True)
class Placement:
    """Where one step runs. `exact` False: it shares CPUs with other steps. `gres`: on each of its nodes."""

    nodes: tuple[str, ...]
    cpus_per_node: int
    mem_mb: int
    exact: bool
    group: int | None = None
    service: bool = False
    gres: str = ""


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

    Raises NoRoom if too few of `nodes` are large enough, or, for a cell, have room.
    """
    cpus = spec.ranks // spec.nodes * spec.cpus_per_rank
    mem_mb = megabytes(spec.mem) if spec.mem else DEFAULT_MEM_MB
    steps = list(running)
    open_to = [node for node in nodes if node.group is None or (node.group == 0) == spec.service]
    large = [node for node in open_to if node.cpus >= cpus and (node.mem_mb is None or node.mem_mb >= mem_mb)]
    free = {node.name: _free(node, steps, planned, service=spec.service) for node in large}
    fits = {name: rest.holds(cpus, mem_mb, spec.gres) for name, rest in free.items()}
    able = [node for node in large if spec.service or (fits[node.name] and node.name not in spec.never)]
    if spec.nodes > len(able):
        size = f"cluster.service.{spec.name.partition('-')[0]}" if spec.service else "cluster.cell"
        raise NoRoom(
            f"{spec.name} needs {spec.nodes} nodes with {cpus} CPUs, {mem_mb} MiB and gres {spec.gres or 'none'}; of the"
            f" job's {len(open_to)} nodes for it {len(large)} are that large and {len(able)} have room",
            fix=f"raise --nodes, --cpus-per-task, --mem or --gres of the job, or lower {size}",
        )
    load = Counter(name for step in steps for name in step.nodes if not step.exact)

    def rank(index: int) -> tuple[bool, bool, bool, int, int]:
        name = able[index].name
        return name in spec.never, not fits[name], name in spec.avoid, load[name] - free[name].cpus, -index

    chosen = [able[index] for index in sorted(range(len(able)), key=rank)[: spec.nodes]]
    exact = all(fits[node.name] for node in chosen)
    names = tuple(sorted(node.name for node in chosen))
    return Placement(names, cpus, mem_mb, exact, chosen[0].group, spec.service, spec.gres)


def place_beside(spec: ProcessSpec, node: Node) -> Placement:
    """On this node, sharing its CPUs and all the memory the job has there (0)."""
    return Placement((node.name,), spec.ranks * spec.cpus_per_rank, 0, False, node.group)


@dataclass(frozen=True)
class _Rest:
    """What is left of a node. None: not managed, or not told."""

    cpus: int
    mem_mb: int | None
    gres: Mapping[str, int]
    given_gres: str | None

    def holds(self, cpus: int, mem_mb: int, gres: str) -> bool:
        memory = self.mem_mb is None or self.mem_mb >= mem_mb
        return self.cpus >= cpus and memory and all(starmap(self._device, gres_counts(gres).items()))

    def _device(self, name: str, count: int) -> bool:
        return self.given_gres is None or held(self.given_gres, name) - self.gres.get(name, 0) >= count

    def and_(self, other: _Rest) -> _Rest:
        """The lesser of each; both know the memory or neither does."""
        lesser = None if self.mem_mb is None or other.mem_mb is None else min(self.mem_mb, other.mem_mb)
        return _Rest(min(self.cpus, other.cpus), lesser, self.gres, self.given_gres)


def _free(node: Node, running: Sequence[Placement], planned: Sequence[Placement], *, service: bool) -> _Rest:
    """The rest of a node beside all that runs; for a service also beside planned cells, for a cell beside what is kept."""
    beside = _rest(node, running)
    if service:
        return beside.and_(_rest(node, [*(step for step in running if step.service), *planned]))
    return beside.and_(_rest(node, [step for step in running if not step.service], keep=True))


def _rest(node: Node, steps: Iterable[Placement], *, keep: bool = False) -> _Rest:
    here = [step for step in steps if step.exact and node.name in step.nodes]
    cpus = node.cpus - keep * node.kept_cpus - sum(step.cpus_per_node for step in here)
    taken_mb = keep * node.kept_mb + sum(step.mem_mb for step in here)
    gres = Counter[str]()
    for step in here:
        gres.update(gres_counts(step.gres))
    return _Rest(cpus, None if node.mem_mb is None else node.mem_mb - taken_mb, gres, node.gres)
