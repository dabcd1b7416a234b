"""What this machine can do: Python and packages, torch, run folder, sandbox, limits, environment, container programs.

Checks ask (`ask`), judges decide and are pure. Called by `gyre_hpc.launch.doctor.checks`, on the login node as inside a job.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from packaging.requirements import Requirement

from gyre_hpc.launch.doctor.ask import Answer, ask, probe
from gyre_hpc.launch.doctor.probes import Mpi, Sandbox, Storage, Torch
from gyre_hpc.launch.doctor.site import Finding, fault, ok, warning
from gyre_hpc.launch.plan import KEPT, SCRUBBED

T = TypeVar("T")
GIB: Final = 1 << 30
LEAST_PYTHON: Final = (3, 11)
FULL_BYTES: Final = GIB
"""A quickstart with its checkpoints does not fit."""
LOW_BYTES: Final = 20 * GIB
"""A few checkpoints of a model of a billion parameters do not fit."""
FILES: Final = 4096
"""The gateway holds two sockets per running call; 1024, a usual default, is 500 calls."""
LEAST_SHM: Final = GIB
"""Weights and micro-steps pass through /dev/shm between processes of a node."""
SHARED: Final = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "fuse.ceph",
        "panfs",
        "wekafs",
        "cifs",
        "smb3",
        "glusterfs",
        "fuse.glusterfs",
        "pvfs2",
        "dvs",
        "fuse.dfuse",
        "fuse.juicefs",
        "afs",
        "virtiofs",
        "9p",
    ]
)
NODE_LOCAL: Final = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay"]
)


def answered(answer: Answer, kind: type[T]) -> T | str:
    """What a probe found, or why it found nothing."""
    if not answer.good:
        return answer.why
    try:
        return msgspec.json.decode(answer.out.strip().splitlines()[-1], type=kind)
    except (msgspec.DecodeError, IndexError) as error:
        return f"unreadable answer: {error}"


def check_python() -> list[Finding]:
    requirements = importlib.metadata.requires("gyre_hpc") or []
    return [judge_python(sys.version_info[:3], sys.executable), judge_packages(requirements, installed)]


def judge_python(found: tuple[int, ...], program: str) -> Finding:
    text = f"{'.'.join(map(str, found))}, {program}"
    if found < LEAST_PYTHON:
        return fault("python", text, "use Python 3.11 or later")
    return ok("python", text)


def installed(name: str) -> str:
    """Version of a package, "" if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def judge_packages(requirements: Iterable[str], version_of: Callable[[str], str]) -> Finding:
    """`requirements` as in the package's metadata; those of extras are not looked at."""
    wanted = [Requirement(text) for text in requirements]
    needed = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    found = {each.name: version_of(each.name) for each in needed}
    wrong = [
        each for each in needed if not each.specifier.contains(found[each.name] or "0", prereleases=True)
    ]
    wrong += [each for each in needed if not found[each.name] and each not in wrong]
    if wrong:
        text = ", ".join(f"{each} (found {found[each.name] or 'none'})" for each in wrong)
        return fault(
            "packages", text, f"{sys.executable} -m pip install {' '.join(map(repr, map(str, wrong)))}"
        )
    return ok("packages", ", ".join(f"{name} {version}" for name, version in found.items()))


def check_torch() -> list[Finding]:
    return [judge_torch(answered(probe("torch"), Torch))]


def judge_torch(torch: Torch | str) -> Finding:
    if isinstance(torch, str):
        return fault(
            "torch", f"import torch: {torch}", f"{sys.executable} -m pip install --force-reinstall torch"
        )
    build = f"{torch.version}, {torch.build or 'CPU build'}"
    if torch.hardware and not torch.devices:
        fix = "check the driver and CUDA_VISIBLE_DEVICES" if torch.build else "install a CUDA build of torch"
        return warning("torch", f"{build}; an NVIDIA device is here, torch sees none", fix)
    counts = [f"{torch.devices.count(name)} x {name}" for name in dict.fromkeys(torch.devices)]
    return ok("torch", f"{build}; {', '.join(counts) or 'no accelerator, cells compute on CPUs'}")


def check_storage(root: Path, several_nodes: bool) -> list[Finding]:
    return list(judge_storage(root, answered(probe("storage", str(root)), Storage), several_nodes))


def judge_storage(root: Path, storage: Storage | str, several_nodes: bool) -> Iterator[Finding]:
    """`several_nodes`: runs may span nodes, so that a file system of this node alone is worth a warning."""
    if isinstance(storage, str):
        yield fault(
            "run root", f"{root}: {storage}", "check that file system, or name another with --root FOLDER"
        )
        return
    yield _shared(root, storage, several_nodes)
    yield _space(storage)
    yield _steps(storage)


def _shared(root: Path, storage: Storage, several_nodes: bool) -> Finding:
    found = f"{root} on {storage.kind} ({storage.folder})"
    if storage.kind in SHARED:
        return ok("run root", f"{found}, shared between nodes")
    if not several_nodes:
        return ok("run root", found)
    fix = "set root=FOLDER on a file system that all nodes see; sbatch -N2 slurm/accept.sbatch FOLDER tells"
    known = "this node's own" if storage.kind in NODE_LOCAL else "not known to be shared between nodes"
    return warning("run root", f"{found}, {known}", fix)


def _space(storage: Storage) -> Finding:
    text = f"{storage.free / GIB:.1f} GiB free in {storage.folder}"
    if storage.free < FULL_BYTES:
        return fault("disk", text, "free space, or set root=FOLDER elsewhere")
    if storage.free < LOW_BYTES:
        return warning("disk", text, "enough to try it; for a long run set root=FOLDER elsewhere")
    return ok("disk", text)


def _steps(storage: Storage) -> Finding:
    failed = {step: why for step, why in storage.steps.items() if why}
    text = "; ".join(f"{step}: {why}" for step, why in failed.items())
    if failed.keys() - {"lock"}:
        return fault(
            "files", f"{storage.folder}: {text}", "set root=FOLDER where you may write, rename and fsync"
        )
    if failed:
        fix = "none needed for shards (written and read without locks); for h5py: HDF5_USE_FILE_LOCKING=FALSE"
        return warning("files", f"{storage.folder}: {text}", fix)
    return ok("files", f"{storage.folder}: {', '.join(storage.steps)} work")


def check_sandbox() -> list[Finding]:
    return [judge_sandbox(answered(probe("sandbox"), Sandbox))]


def judge_sandbox(sandbox: Sandbox | str) -> Finding:
    why = sandbox if isinstance(sandbox, str) else sandbox.why
    if not why:
        return ok("sandbox", "user namespaces work: harness and tests run isolated")
    enable = "" if isinstance(sandbox, str) else f"an administrator allows them by {sandbox.enable}; "
    return warning("sandbox", f"no user namespaces: {why}", f"{enable}or trust the tasks: trust_tasks=true")


def check_limits() -> list[Finding]:
    return [judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE))]


def judge_files(soft: int, hard: int) -> Finding:
    text = f"{_limit(soft)} open files, up to {_limit(hard)} on request"
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        return ok("open files", text)
    possible = hard == resource.RLIM_INFINITY or hard >= FILES
    fix = f"ulimit -n {FILES} before gyre" if possible else "ask for a higher hard limit (limits.conf)"
    return warning("open files", f"{text}; many running calls need {FILES}", fix)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_shm() -> list[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return [judge_shm(None)]
    space = os.statvfs(folder)
    return [judge_shm((space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize))]


def judge_shm(space: tuple[int, int] | None) -> Finding:
    """`space`: bytes in all and free."""
    if space is None:
        return warning("/dev/shm", "does not exist: regions pass through TMPDIR", "mount a tmpfs on /dev/shm")
    text = f"{space[1] / GIB:.1f} of {space[0] / GIB:.1f} GiB free"
    if space[1] < LEAST_SHM:
        return warning(
            "/dev/shm", text, "remove what ended jobs left there, or enlarge it (containers: --shm-size)"
        )
    return ok("/dev/shm", text)


def check_environment() -> list[Finding]:
    return [judge_environment(os.environ)]


def judge_environment(env: Mapping[str, str]) -> Finding:
    """Variables of an enclosing job size and bind what is started from this shell by hand; gyre removes them itself."""
    left = sorted(name for name in env if name.startswith(SCRUBBED) and name not in KEPT)
    if not left:
        return ok("environment", "nothing left by a Slurm job or MPI")
    if "SLURM_JOB_ID" in env:
        return ok(
            "environment", f"inside job {env['SLURM_JOB_ID']}; gyre hides its variables from its processes"
        )
    shown = ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else "")
    return warning(
        "environment", shown, f"gyre submit ignores them, sbatch and srun do not: unset {' '.join(left)}"
    )


def check_containers() -> list[Finding]:
    programs = [name for name in ("apptainer", "singularity", "enroot") if shutil.which(name)]
    found = [
        _version_line(ask(name, "version" if name == "enroot" else "--version"), name) for name in programs
    ]
    return [
        ok("containers", "; ".join(found) or "no apptainer, singularity or enroot: cells run on the host")
    ]


def _version_line(answer: Answer, name: str) -> str:
    if not answer.good:
        return f"{name}: {answer.why}"
    return f"{name} {(answer.out.split() or ['?'])[-1]}"


def mpi_library() -> Mpi | str:
    """The MPI library that mpi4py finds, or why it finds none."""
    if not installed("mpi4py"):
        return "mpi4py is not installed"
    return answered(probe("mpi"), Mpi)
