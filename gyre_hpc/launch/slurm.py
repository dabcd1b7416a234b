"""Processes of a run as srun steps inside the allocation the controller runs in (flat layout: it is the batch step).

Every flag is explicit: srun inherits nothing from the job script. A process is one step; it is signalled and cancelled
by its step id, and its end is srun's exit. What Slurm's query commands do not know is never taken for an end. Under
--kill-on-bad-exit one dead rank ends its step and no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

from gyre_hpc.config import ClusterConfig
from gyre_hpc.errors import ConfigError, GyreError, MissingInput
from gyre_hpc.launch.local import LocalProcess, spawn
from gyre_hpc.launch.placement import Node, Placement, cpus_per_node, place
from gyre_hpc.launch.plan import ProcessSpec, child_environment
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)

COMMAND_S: Final = 30.0
"""Slurm's query commands wait for a busy controller about this long."""


class SlurmCommandFailed(GyreError):
    """A Slurm command returned an error (names command and node)."""


class SlurmLauncher:
    """Starts one srun step per process in job `job` on `nodes`."""

    def __init__(self, job: str, nodes: Sequence[Node], cluster: ClusterConfig) -> None:
        self._job = job
        self._nodes = tuple(nodes)
        self._srun_args = list(cluster.srun_args)
        self._running: dict[str, Placement] = {}
        self._serial = itertools.count(1)

    @classmethod
    def from_environment(
        cls, cluster: ClusterConfig, layout: RunLayout, env: Mapping[str, str] = os.environ
    ) -> Self:
        """The launcher of the job this process runs in."""
        job, nodelist = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
        if not job or not nodelist:
            raise ConfigError(
                f"cluster.kind=slurm, but {layout.root} is not run inside a Slurm job",
                fix="sbatch slurm/train.sbatch ARGUMENTS, or set cluster.kind=local",
            )
        names = _query("scontrol", "show", "hostnames", nodelist).split()
        cpus = cpus_per_node(env.get("SLURM_JOB_CPUS_PER_NODE", ""), len(names))
        nodes = [Node(name, count, _memory_mb(env, count)) for name, count in zip(names, cpus, strict=True)]
        return cls(job, nodes, cluster)

    async def start(self, spec: ProcessSpec) -> SlurmStep:
        step_name = f"{spec.name}.{next(self._serial)}"
        placement = place(spec, await self._live_nodes(), self._running.values())
        self._running[step_name] = placement
        argv = srun_command(self._job, step_name, spec, placement, self._srun_args)
        log.info("%s: %s", spec.name, " ".join(argv))
        try:
            process = spawn(replace(spec, argv=argv))
        except MissingInput:
            del self._running[step_name]
            raise
        return SlurmStep(self._job, step_name, spec.name, process, self._running)

    async def _live_nodes(self) -> list[Node]:
        """The nodes the job still has: Slurm cuts a failed node out of a job started with --no-kill."""
        try:
            names = await asyncio.to_thread(
                lambda: _query(
                    "scontrol", "show", "hostnames", _query("squeue", "-h", "-j", self._job, "-o", "%N")
                )
            )
        except SlurmCommandFailed as error:
            log.warning("placing on the job's first node list: %s", error)
            return list(self._nodes)
        alive = set(names.split())
        return [node for node in self._nodes if node.name in alive] or list(self._nodes)


def srun_command(
    job: str, step_name: str, spec: ProcessSpec, placement: Placement, extra: Sequence[str]
) -> list[str]:
    """The whole srun command line of one step."""
    return [
        "srun",
        f"--jobid={job}",
        f"--job-name={step_name}",
        f"--nodelist={','.join(placement.nodes)}",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.ranks}",
        f"--cpus-per-task={spec.cpus_per_rank}",
        f"--mem={placement.mem_mb}M",
        f"--gres={spec.gres or 'none'}",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--exact" if placement.exact else "--overlap",
        *extra,
        *spec.argv,
    ]


class SlurmStep:
    """One step. Its srun is a child of ours; the tasks answer to the step id."""

    def __init__(
        self,
        job: str,
        step_name: str,
        name: str,
        process: subprocess.Popen[bytes],
        running: dict[str, Placement],
    ) -> None:
        self._job = job
        self._step_name = step_name
        self._srun = LocalProcess(name, process, on_end=lambda: _forget(running, step_name))
        self._cancelling: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._srun.name

    @property
    def pid(self) -> int:
        return self._srun.pid

    def poll(self) -> int | None:
        return self._srun.poll()

    async def wait(self) -> int:
        code = await self._srun.wait()
        if code < 0:
            await self._signal("KILL")
        return code

    async def terminate(self, grace_s: float) -> None:
        if self.poll() is None:
            await self._signal_or_end_srun("TERM")
        try:
            async with asyncio.timeout(grace_s):
                await self._srun.wait()
        except TimeoutError:
            await self._signal_or_end_srun("KILL")
            await self._srun.wait()

    def kill(self) -> None:
        if self.poll() is None:
            self._cancelling = asyncio.get_running_loop().create_task(self._signal_or_end_srun("KILL"))

    async def _signal_or_end_srun(self, sig: str) -> None:
        """Signal the tasks; if there is no step (still queued, or gone), end srun itself."""
        if not await self._signal(sig):
            self._srun.kill()

    async def _signal(self, sig: str) -> bool:
        try:
            return await asyncio.to_thread(signal_step, self._job, self._step_name, sig)
        except SlurmCommandFailed as error:
            log.error("%s: %s", self._step_name, error)
            return False


def _forget(running: dict[str, Placement], step_name: str) -> None:
    running.pop(step_name, None)


def signal_step(job: str, step_name: str, sig: str) -> bool:
    """Send `sig` to the tasks of the job's step of this name; False if Slurm lists no such step."""
    for line in _query("squeue", "-h", "-s", "-j", job, "-o", "%i %j").splitlines():
        step, _, name = line.partition(" ")
        if name.strip() == step_name:
            _query("scancel", f"--signal={sig}", step)
            return True
    return False


def _query(*argv: str) -> str:
    """Output of a Slurm command. Raises SlurmCommandFailed with its own words."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=COMMAND_S, env=child_environment({}), check=False
        )
    except FileNotFoundError as error:
        raise MissingInput(
            f"{argv[0]}: no such program", fix="run on a node with Slurm's commands"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmCommandFailed(f"{' '.join(argv)}: no answer within {COMMAND_S:g} s") from error
    if done.returncode != 0:
        raise SlurmCommandFailed(f"{' '.join(argv)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout.strip()


def _memory_mb(env: Mapping[str, str], cpus: int) -> int | None:
    if per_node := env.get("SLURM_MEM_PER_NODE"):
        return int(per_node)
    if per_cpu := env.get("SLURM_MEM_PER_CPU"):
        return int(per_cpu) * cpus
    return None
