"""What a launched process is, behind one interface with two implementations: `local` and `slurm`.

A launcher starts a process described by a `ProcessSpec` and hands back a `ProcessHandle`; nobody else starts the
processes of a run. When the process ends, for whatever reason, everything it left running in its group or step is
killed before the exit is reported. The environment is the caller's without Slurm's and PMI's variables, plus `env`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

SCRUBBED: Final = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_"),
    *("SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SCONTROL_"),
)
"""Left by an enclosing job or step: they would bind or size the new process (a known cause of 3x slower jobs). Or a person's
habits: they filter and format what Slurm's commands say (SQUEUE_STATES, SINFO_PARTITION), or make them ask back."""
KEPT: Final = frozenset({"SLURM_CONF"})
"""A site or cluster whose slurm.conf is not in the default place needs it."""

CONTROLLER: Final = "controller"


@dataclass(frozen=True)
class ProcessSpec:
    """One process (or, under Slurm, one step of `ranks` tasks on `nodes` nodes). `env` is added, `log` appended to.

    `outlives`: it watches its own link and is not killed by the death of the process that started it (local; under Slurm a
    step ends with the job).
    `avoid`: nodes to be taken last; `never`: not at all.
    `beside`: the name of a running process, or CONTROLLER: it goes to the (first) node of that one and shares all with it
    (slurm). `mpi` is srun's --mpi.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path = Path(os.devnull)
    nodes: int = 1
    ranks: int = 1
    cpus_per_rank: int = 1
    mem: str = ""
    gres: str = ""
    service: bool = False
    """Beside the controller and not a cell: on the controller's component, in what the cells leave over (slurm)."""
    outlives: bool = False
    avoid: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    beside: str = ""
    mpi: str = "none"

    def __post_init__(self) -> None:
        if not self.argv or min(self.nodes, self.ranks, self.cpus_per_rank) < 1 or self.ranks % self.nodes:
            raise ValueError(
                f"process {self.name}: {self.ranks} ranks on {self.nodes} nodes, argv {self.argv}"
            )


class ProcessHandle(Protocol):
    """A started process. Its methods are called from the event loop that started it."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int:
        """Process id on this host; under Slurm that of the step's srun."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes it runs on; () for this host."""

    @property
    def unanswered(self) -> bool:
        """It was killed and its node did not say that it has ended."""

    def poll(self) -> int | None:
        """Exit code (negative: the signal that ended it), None while it runs."""

    async def wait(self) -> int:
        """Exit code, once it has ended and nothing of its group is left."""

    async def terminate(self, grace_s: float) -> None:
        """Ask it to end (SIGTERM), kill what is left after `grace_s`; returns when it has ended."""

    def kill(self) -> None:
        """Kill it with its whole group now; the end is reported by `wait`."""


class Launcher(Protocol):
    """Starts processes."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start it. Raises MissingInput if its program does not exist, NoRoom where no node can take it."""


class SiteLauncher(Launcher, Protocol):
    """A launcher that knows its nodes: the run's own."""

    async def usable(self) -> frozenset[str] | None:
        """Nodes that can be given a process, as far as the resource manager knows; None if nobody says."""

    async def answers(self, node: str) -> bool:
        """Whether a process can be started on the node, found out by starting one."""


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what an enclosing job left in it, plus `extra`."""
    inherited = {
        name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(SCRUBBED)
    }
    return inherited | dict(extra)
