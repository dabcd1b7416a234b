"""What this site's Slurm can do, asked of its own commands on the login node; judged by pure functions over their output.

The rules were seen on Slurm 22.05; what each setting means to a run is said in docs/slurm.md. Without Slurm a run is
local, which is a warning and no fault.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gyre_hpc.launch.doctor.ask import Answer, ask
from gyre_hpc.launch.doctor.machine import mpi_library
from gyre_hpc.launch.doctor.probes import Mpi
from gyre_hpc.launch.doctor.site import Finding, fault, ok, warning

NEEDED: Final = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
LEAST_VERSION: Final = (20, 11, 3)
"""The first with srun --exact."""
SINFO: Final = "%R|%a|%l|%D|%c|%m|%G"
MPI_PLUGINS: Final = {
    "Open MPI": ("pmix",),
    "Intel": ("pmi2",),
    "CRAY": ("cray_shasta", "pmi2"),
    "MPICH": ("pmi2",),
}
"""What a library's description holds, and the plugins of srun that start it as one world. Open MPI and MPICH were run."""


def several_nodes() -> bool:
    """Whether runs may span nodes here: there is a Slurm."""
    return shutil.which("sbatch") is not None


def check_commands() -> list[Finding]:
    return [judge_commands([name for name in (*NEEDED, "sacct") if shutil.which(name)])]


def judge_commands(found: Collection[str]) -> Finding:
    missing = [name for name in NEEDED if name not in found]
    if not found:
        return warning(
            "slurm commands", "none", "runs are local here (gyre train); on a cluster: module load slurm"
        )
    if missing:
        return fault(
            "slurm commands", f"no {', '.join(missing)}", "add the folder of Slurm's commands to PATH"
        )
    return ok("slurm commands", ", ".join(found))


def check_slurm() -> list[Finding]:
    """Everything slurmctld tells; one finding where it does not answer."""
    answer = ask("scontrol", "show", "config")
    if answer.missing:
        return []
    settings = settings_of(answer.out)
    if not answer.good or "SLURM_VERSION" not in settings:
        return [judge_silence(answer, inside="SLURM_JOB_ID" in os.environ)]
    return [
        *(judge(settings) for judge in SETTINGS),
        judge_accounting(settings, ask("sacct", "-n", "-X")),
        *check_partitions(),
        *judge_mpi(ask("srun", "--mpi=list"), mpi_library()),
    ]


def judge_silence(answer: Answer, *, inside: bool) -> Finding:
    """No slurmctld answers: a laptop with Slurm's packages, or a login node on a bad day; `inside` a job it is a fault."""
    text = f"Slurm's commands are here, but no cluster answers them: {answer.why}"
    fix = "on a cluster: scontrol ping, SLURM_CONF, or ask the site"
    if inside:
        return fault("slurm", text, fix)
    return warning("slurm", text, f"{fix}; on a machine by itself nothing: runs are local (gyre train)")


def judge_version(settings: Mapping[str, str]) -> Finding:
    version = settings["SLURM_VERSION"]
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < LEAST_VERSION:
        return fault(
            "slurm", version, "use a cluster with Slurm 20.11.3 or later: cells are steps with srun --exact"
        )
    return ok("slurm", f"{version}, cluster {settings.get('ClusterName', '?')}")


def settings_of(text: str) -> dict[str, str]:
    """`scontrol show config` as a mapping; what is unset is "(null)" there and "" here."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip().replace("(null)", "") for name, value in pairs}


def judge_requeue(settings: Mapping[str, str]) -> Finding:
    codes = settings.get("RequeueExit", "")
    text = f"JobRequeue={settings.get('JobRequeue', '?')}, exit codes that requeue: {codes or 'none'}"
    if settings.get("JobRequeue") == "0":
        fix = "gyre submit asks for it (cluster.job.requeue); in slurm/train.sbatch add #SBATCH --requeue"
        return warning("requeue", text, fix)
    return ok("requeue", text)


def judge_preemption(settings: Mapping[str, str]) -> Finding:
    kind, mode = settings.get("PreemptType", ""), settings.get("PreemptMode", "?")
    if kind in ("", "preempt/none"):
        return ok("preemption", "none")
    return ok("preemption", f"{kind}, PreemptMode={mode}; per partition below")


def judge_tracking(settings: Mapping[str, str]) -> Finding:
    kind = settings.get("ProctrackType", "?")
    if kind == "proctrack/cgroup":
        return ok("process tracking", kind)
    fix = "gyre kills what its own processes leave; others may remain on a node: ask for proctrack/cgroup"
    return warning("process tracking", f"{kind}: a process that left its parent can outlive its step", fix)


def judge_het(settings: Mapping[str, str]) -> Finding:
    kind, parameters = settings.get("SchedulerType", "?"), settings.get("SchedulerParameters", "")
    if kind != "sched/backfill":
        fix = "use cluster.layout=flat: only the backfill scheduler starts heterogeneous jobs"
        return warning("heterogeneous jobs", kind, fix)
    if "disable_hetjob_steps" in parameters.split(","):
        text = "allowed, no step over several components (disable_hetjob_steps): none of gyre's steps is"
        return ok("heterogeneous jobs", text)
    return ok("heterogeneous jobs", "allowed (sched/backfill)")


SETTINGS: Final[tuple[Callable[[Mapping[str, str]], Finding], ...]] = (
    judge_version,
    judge_requeue,
    judge_preemption,
    judge_tracking,
    judge_het,
)


def judge_accounting(settings: Mapping[str, str], sacct: Answer) -> Finding:
    kind, kept = settings.get("AccountingStorageType", "?"), settings.get("MinJobAge", "?")
    if kind == "accounting_storage/none":
        fix = "nothing to do: gyre asks squeue; ended jobs are known by RUN/jobs/ID.log"
        return warning("accounting", f"none; Slurm forgets an ended job after {kept} (MinJobAge)", fix)
    if not sacct.good:
        fix = "nothing to do for a run; ended jobs are known by RUN/jobs/ID.log"
        return warning("accounting", f"{kind}, but sacct: {sacct.why}", fix)
    return ok("accounting", f"{kind}, sacct answers")


@dataclass
class Partition:
    """One partition: its rows of sinfo, and what scontrol says of it."""

    name: str
    up: bool = False
    limit: str = ""
    nodes: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)


def check_partitions() -> list[Finding]:
    rows = ask("sinfo", "-h", "-o", SINFO)
    if not rows.good:
        return [fault("partitions", f"sinfo: {rows.why}", "check that slurmctld runs: scontrol ping")]
    return judge_partitions(partitions_of(rows.out, ask("scontrol", "show", "partition", "--oneliner").out))


def partitions_of(sinfo: str, scontrol: str) -> list[Partition]:
    """Partitions in the order of sinfo, whose format is `SINFO`; several kinds of nodes are several rows."""
    found: dict[str, Partition] = {}
    rows = (line.strip() for line in sinfo.splitlines())
    for line in (row for row in rows if row.count("|") == SINFO.count("|")):
        name, availability, limit, nodes, cpus, memory, gres = line.split("|")
        partition = found.setdefault(name, Partition(name, availability == "up", limit))
        devices = "" if gres == "(null)" else f", {gres}"
        partition.nodes.append(f"{nodes} nodes x {cpus} CPUs, {memory} MiB{devices}")
    for line in scontrol.splitlines():
        keys = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if keys.get("PartitionName") in found:
            found[keys["PartitionName"]].keys = keys
    return list(found.values())


def judge_partitions(partitions: list[Partition]) -> list[Finding]:
    if not any(partition.up for partition in partitions):
        names = ", ".join(each.name for each in partitions) or "none"
        return [
            fault("partitions", f"{names}: none is up for you", "ask the site which partition you may use")
        ]
    return [_judge_partition(partition) for partition in partitions]


def _judge_partition(partition: Partition) -> Finding:
    name, keys = f"partition {partition.name}", partition.keys
    mode, grace = keys.get("PreemptMode", "?"), keys.get("GraceTime", "?")
    default = " (default)" if keys.get("Default") == "YES" else ""
    text = f"{'; '.join(partition.nodes)}; limit {partition.limit}{default}"
    if mode not in ("OFF", "?"):
        text += f"; PreemptMode={mode}, GraceTime={grace} s"
    if not partition.up:
        return warning(name, f"{text}; not up", "choose another with cluster.job.partition")
    if mode.startswith(("CANCEL", "SUSPEND")):
        fix = "a preempted run is ended or stopped: gyre submit resume=RUN, or choose another partition"
        return warning(name, text, fix)
    return ok(name, text)


def judge_mpi(listed: Answer, library: Mpi | str) -> Iterator[Finding]:
    """The plugins of srun, and whether one of them starts the library mpi4py finds. No part of a run needs MPI."""
    plugins = plugins_of(listed)
    if not plugins:
        yield warning("mpi plugins", f"srun --mpi=list: {listed.why}", "runs do not need them; ask the site")
    else:
        yield ok("mpi plugins", ", ".join(plugins))
    if isinstance(library, str):
        yield ok("mpi library", f"{library}; runs use sockets")
        return
    fitting = [plugin for plugin in wanted_plugins(library) if plugin in plugins]
    if fitting:
        yield ok("mpi library", f"{library.library}: srun --mpi={fitting[0]}")
    else:
        fix = "runs use sockets and do not need it; for MPI: another library (pip install mpich), or MPI4PY_LIBMPI=FILE"
        needs = " or ".join(wanted_plugins(library)) or "an unknown plugin"
        yield warning("mpi library", f"{library.library} needs srun --mpi={needs}, this Slurm has none", fix)


def plugins_of(listed: Answer) -> list[str]:
    """Names in the answer to `srun --mpi=list`, which differs between versions: one a line, with or without a heading before."""
    if not listed.good:
        return []
    words = [line.split(":")[-1].strip() for line in (listed.out + "\n" + listed.err).splitlines()]
    return [
        word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word) and not word.startswith("pmix_v")
    ]


def wanted_plugins(library: Mpi) -> tuple[str, ...]:
    return next((plugins for word, plugins in MPI_PLUGINS.items() if word in library.library), ())


def check_pyxis() -> list[Finding]:
    answer = ask("srun", "--help")
    has = "--container-image" in answer.out
    return [ok("pyxis", "srun --container-image works as cluster.container")] if has else []
