"""Processes of a run as srun steps inside the allocation whose batch step is the controller; flat or heterogeneous.

Every flag is explicit: srun inherits nothing from the job script. A process is one step; it is signalled and cancelled
by its step id, and its end is srun's exit, or ours of an srun whose step did not end KILL_S after it was killed: its node is
gone and Slurm does not know yet. While slurmctld does not answer it is asked again and again to end such a step. What Slurm's query
commands do not know is never taken for an end. Under --kill-on-bad-exit one dead rank ends its step and no other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from gyre_hpc.config_cluster import ClusterConfig
from gyre_hpc.errors import ConfigError, MissingInput, PeerLost
from gyre_hpc.launch.commands import SlurmCommandFailed, hostnames, query
from gyre_hpc.launch.job.allocation import (
    Allocation,
    planned_steps,
    read_allocation,
    read_gres,
    with_room_kept,
)
from gyre_hpc.launch.job.node_copy import NodeCopy
from gyre_hpc.launch.local import LocalProcess, spawn
from gyre_hpc.launch.nodes.placement import DEFAULT_MEM_MB, Node, Placement, place, place_beside
from gyre_hpc.launch.nodes.states import node_states
from gyre_hpc.launch.plan import CONTROLLER, ProcessSpec
from gyre_hpc.layout import RunLayout

log = logging.getLogger(__name__)
HOLDS_ITS_NODES: Final = frozenset({"RUNNING", "SUSPENDED"})
UNANSWERED_S: Final = 20.0
KILL_S: Final = 15.0
"""A step on a node that answers ends well within this, once it is killed."""
PROBE_S: Final = 15.0
"""A step that only ends takes less than a second on a node that answers."""
AGAIN_S: Final = 10.0
"""Seconds between two requests to end a step while Slurm does not answer."""
EVERYWHERE_S: Final = 15.0
"""Longest wait for a command that runs on every node."""
NODE_LOST: Final = -9
"""Exit code, as if killed, of a step whose node Slurm has lost."""
LAST_WORDS: Final = 4096
"""Bytes at the end of a log in which srun says so: it is the last it says."""

NO_STEP: Final = ("down", "fail", "inval", "unk", "pow")
"""How node states begin under which no step starts. A draining node starts no job, but steps of one that holds it (measured)."""


class SlurmLauncher:
    """Starts one srun step per process in `allocation`."""

    def __init__(self, allocation: Allocation, cluster: ClusterConfig) -> None:
        gres = read_gres(allocation)
        self._jobs = allocation.jobs
        nodes = [replace(node, gres=gres.get(node.name)) for node in allocation.nodes]
        self._nodes = with_room_kept(cluster, nodes)
        self._cluster = cluster
        self._planned = planned_steps(cluster, allocation.nodes)
        self._running: dict[str, Placement] = {}
        self._serial = itertools.count(1)
        self._ask_after = float("-inf")
        self.copy: NodeCopy | None = None

    @classmethod
    def from_environment(
        cls, cluster: ClusterConfig, layout: RunLayout, env: Mapping[str, str] = os.environ
    ) -> Self:
        """The launcher of the job this process runs in."""
        allocation = read_allocation(env)
        if allocation is None:
            raise ConfigError(
                f"cluster.kind=slurm, but {layout.root} is not run inside a Slurm job",
                fix="gyre submit ARGUMENTS, sbatch slurm/train.sbatch ARGUMENTS, or set cluster.kind=local",
            )
        return cls(allocation, cluster)

    @property
    def jobs(self) -> tuple[str, ...]:
        """Slurm's id of each component of the job."""
        return self._jobs

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes the job began with."""
        return tuple(node.name for node in self._nodes)

    async def start(self, spec: ProcessSpec) -> SlurmStep:
        step_name = f"{spec.name}.{next(self._serial)}"
        placement = await self._place(spec)
        self._running[step_name] = placement
        here = spec if self.copy is None else self.copy.applied(spec, placement.nodes, self._cluster)
        command = contained(here, self._cluster)
        argv = srun_command(self._jobs[0], step_name, command, placement, self._cluster.srun_args)
        log.info("%s: %s", spec.name, " ".join(argv))
        try:
            env = {**_own_folder(), **here.env}
            process = spawn(replace(spec, argv=argv, env=env, outlives=False))
        except MissingInput:
            del self._running[step_name]
            raise
        job = self._jobs[placement.group or 0]
        return SlurmStep(job, step_name, spec, process, self._running, placement.nodes)

    async def everywhere(self, argv: Sequence[str], log_file: Path, limit_s: float | None = None) -> None:
        """Run a command once on every node the job still has, for `limit_s` (`EVERYWHERE_S`) at most; what fails is logged."""
        nodes = await self._live_nodes()
        for group in dict.fromkeys(node.group for node in nodes):
            names = tuple(node.name for node in nodes if node.group == group)
            spec = ProcessSpec(
                "everywhere", argv, nodes=len(names), ranks=len(names), log=log_file, service=True
            )
            placement = Placement(names, 1, DEFAULT_MEM_MB, False, group, service=True)
            command = srun_command(self._jobs[0], spec.name, spec, placement, self._cluster.srun_args)
            process = LocalProcess(spec.name, spawn(replace(spec, argv=command, env=_own_folder())))
            try:
                async with asyncio.timeout(limit_s or EVERYWHERE_S):
                    code = await process.wait()
            except TimeoutError:
                process.kill()
                code = await process.wait()
            if code != 0:
                log.warning("%s on %s: exited with %d, see %s", argv[2], ",".join(names), code, log_file)

    async def _place(self, spec: ProcessSpec) -> Placement:
        """Raises ConfigError if the job is too small, PeerLost if the process to go beside has ended."""
        if not spec.beside:
            return place(spec, await self._live_nodes(), self._running.values(), self._planned)
        if spec.beside == CONTROLLER:
            return place_beside(spec, self._nodes[0])
        hosts = [
            placement for step, placement in self._running.items() if step.rpartition(".")[0] == spec.beside
        ]
        if not hosts:
            raise PeerLost(f"{spec.name}: {spec.beside} does not run")
        return place_beside(spec, next(node for node in self._nodes if node.name == hosts[-1].nodes[0]))

    async def usable(self) -> frozenset[str] | None:
        return await asyncio.to_thread(self._usable)

    def _usable(self) -> frozenset[str] | None:
        """Nodes the job still has (Slurm cuts a failed one out of a job started with --no-kill) and that answer Slurm.

        None also of a job that does not run: one that ends or is requeued loses its nodes one by one, and none of them is bad.
        After no answer Slurm is left alone for UNANSWERED_S: whoever waits for one waits long.
        """
        if time.monotonic() < self._ask_after:
            return None
        try:
            listed = query("squeue", "-h", "-j", self._jobs[0], "-o", "%T %N").splitlines()
            states, nodelists = zip(*(line.split(maxsplit=1) for line in listed), strict=True)
            if not HOLDS_ITS_NODES.issuperset(states):
                return None
            names = hostnames(" ".join(nodelists))
            lines = query("sinfo", "-h", "-N", "-n", ",".join(names), "-o", "%N %t %P")
        except SlurmCommandFailed as error:
            log.warning("placing on the job's first node list: %s", error)
            self._ask_after = time.monotonic() + UNANSWERED_S
            return None
        except ValueError:  # no job, or one without nodes
            return None
        node_state = {node: state for each in node_states(lines).values() for node, state in each.items()}
        return frozenset(name for name in names if _takes_steps(node_state.get(name, "unknown")))

    async def _live_nodes(self) -> list[Node]:
        usable = await self.usable()
        return [node for node in self._nodes if usable is None or node.name in usable]

    async def answers(self, node: str) -> bool:
        """A step that shares the node and ends at once."""
        group = next((known.group for known in self._nodes if known.name == node), None)
        spec = ProcessSpec("probe", ["true"])
        argv = srun_command(self._jobs[0], "probe", spec, Placement((node,), 1, 1, False, group), [])
        try:
            process = LocalProcess("probe", spawn(replace(spec, argv=argv)))
            async with asyncio.timeout(PROBE_S):
                return await process.wait() == 0
        except TimeoutError:
            process.kill()
            return False
        except MissingInput:
            return False


def _takes_steps(state: str) -> bool:
    """`state` "": the node does not answer Slurm."""
    return state == "unknown" or (bool(state) and not state.startswith(NO_STEP))


def _own_folder() -> dict[str, str]:
    """Where the site put this job's own folder; scrubbed from what steps inherit, like all that begins with SLURM_."""
    return {name: os.environ[name] for name in ("SLURM_TMPDIR",) if name in os.environ}


def contained(spec: ProcessSpec, cluster: ClusterConfig) -> ProcessSpec:
    """A cell with `cluster.container` before its command and the container's Python in it; anything else as it is.

    Words that are options of srun itself (pyxis) end up there: they stand right behind srun's own.
    """
    if not cluster.container or spec.service:
        return spec
    python = cluster.container_python or sys.executable
    argv = [python if word == sys.executable else word for word in spec.argv]
    return replace(spec, argv=[*cluster.container, *argv])


def srun_command(
    job: str, step_name: str, spec: ProcessSpec, placement: Placement, extra: Sequence[str]
) -> list[str]:
    """The whole srun command line of one step; `job` is the id of the first component."""
    return [
        "srun",
        f"--jobid={job}",
        *([] if placement.group is None else [f"--het-group={placement.group}"]),
        f"--job-name={step_name}",
        f"--nodelist={','.join(placement.nodes)}",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.ranks}",
        f"--cpus-per-task={spec.cpus_per_rank}",
        f"--mem={placement.mem_mb}{'M' if placement.mem_mb else ''}",
        f"--gres={spec.gres or 'none'}",
        "--cpu-bind=none",
        f"--mpi={spec.mpi}",
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
        spec: ProcessSpec,
        process: subprocess.Popen[bytes],
        running: dict[str, Placement],
        nodes: tuple[str, ...],
    ) -> None:
        self._nodes, self._unanswered, self._log = nodes, False, spec.log
        self._job = job
        self._step_name = step_name
        self._srun = LocalProcess(spec.name, process, on_end=lambda: _forget(running, step_name))
        self._cancelling: asyncio.Task[None] | None = None
        self._ending_later: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._srun.name

    @property
    def pid(self) -> int:
        return self._srun.pid

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._nodes

    @property
    def unanswered(self) -> bool:
        return self._unanswered

    def poll(self) -> int | None:
        code = self._srun.poll()
        return NODE_LOST if code == 0 and self._lost() else code

    async def wait(self) -> int:
        code = await self._srun.wait()
        if code < 0 and not self._unanswered:
            await self._signal("KILL")
        return NODE_LOST if code == 0 and self._lost() else code

    def _lost(self) -> bool:
        """An srun that never heard of the end of its tasks, because Slurm lost their node, exits with 0 (measured)."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS))
                said = file.read()
        except OSError:
            return False
        return any(f"error: Node failure on {node}".encode() in said for node in self._nodes)

    async def terminate(self, grace_s: float) -> None:
        if self.poll() is None:
            await self._signal_or_end_srun("TERM")
        try:
            async with asyncio.timeout(grace_s):
                await self._srun.wait()
        except TimeoutError:
            await self._kill()
            await self._srun.wait()

    def kill(self) -> None:
        if self.poll() is None and self._cancelling is None:
            self._cancelling = asyncio.get_running_loop().create_task(self._kill())

    async def _kill(self) -> None:
        """An srun outlives its step for as long as Slurm takes to notice that the node is gone: not with us.

        scancel, too, waits for a dead node (10 s, measured). Without slurmctld nobody can end the tasks, not even srun (SIGTERM to it
        leaves them, measured): a process that answers ends by its link, what does not is ended when slurmctld is back.
        """
        signalling = asyncio.create_task(self._signal_or_end_srun("KILL"))
        try:
            async with asyncio.timeout(KILL_S):
                await self._srun.wait()
        except TimeoutError:
            self._unanswered = True
            log.error(
                "%s does not end %g s after it was killed: %s does not answer",
                self._step_name,
                KILL_S,
                ", ".join(self._nodes),
            )
            self._srun.kill()
        await signalling

    async def _signal_or_end_srun(self, sig: str) -> None:
        """Signal the tasks; if there is no step (still queued, or gone), end srun itself.

        Where Slurm does not say, srun is left alone for KILL_S.
        """
        if await self._signal(sig) is False:
            self._srun.kill()

    async def _signal(self, sig: str) -> bool | None:
        """Whether Slurm has such a step; None: it does not say, and what is to be killed is killed when it answers."""
        try:
            return await asyncio.to_thread(signal_step, self._job, self._step_name, sig)
        except SlurmCommandFailed as error:
            log.error("%s: %s", self._step_name, error)
            if sig == "KILL" and self._ending_later is None:
                self._ending_later = asyncio.get_running_loop().create_task(self._end_later())
            return None

    async def _end_later(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                await asyncio.to_thread(signal_step, self._job, self._step_name, "KILL")
                return
            except SlurmCommandFailed as error:
                log.info("%s: %s", self._step_name, error)


def _forget(running: dict[str, Placement], step_name: str) -> None:
    running.pop(step_name, None)


def signal_step(job: str, step_name: str, sig: str) -> bool:
    """Send `sig` to the tasks of the job's step of this name; False if Slurm lists no such step."""
    for line in query("squeue", "-h", "-s", "-j", job, "-o", "%i %j").splitlines():
        step, _, name = line.partition(" ")
        if name.strip() == step_name:
            query("scancel", f"--signal={sig}", step)
            return True
    return False
