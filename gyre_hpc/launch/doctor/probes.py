"""What `gyre doctor` tries out in a child process: `python -m gyre_hpc.launch.doctor.probes NAME [ARGUMENT]`.

Each probe prints one JSON object, the struct of its name; a probe that cannot end normally is ended or judged by its
parent (`ask`). Judging what was found is not done here.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from gyre_hpc.errors import CorruptRecord
from gyre_hpc.launch.doctor.site import Site, read_site


class Torch(msgspec.Struct, frozen=True):
    """Version, "CUDA 12.8" or the like ("" = CPU build), devices torch sees, whether the machine has an NVIDIA device."""

    version: str
    build: str
    devices: list[str]
    hardware: bool


class Storage(msgspec.Struct, frozen=True):
    """The nearest existing folder of a path, its file system, bytes free there, and what failed by step ("" = worked)."""

    folder: str
    kind: str
    free: int
    steps: dict[str, str]


class Mpi(msgspec.Struct, frozen=True):
    """First line of the library's own description."""

    library: str


class World(msgspec.Struct, frozen=True):
    """Rank and size of MPI_COMM_WORLD."""

    rank: int
    size: int


class Sandbox(msgspec.Struct, frozen=True):
    """Why programs cannot be isolated here ("" = they can), and the command that allows it."""

    why: str
    enable: str


class Accepted(msgspec.Struct, frozen=True):
    """`site.json` of a folder, None where there is none, or why it cannot be read."""

    site: Site | None = None
    why: str = ""


def torch_() -> Torch:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    hardware = Path("/dev/nvidiactl").exists()
    builds = (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip))
    build = next((f"{name} {version}" for name, version in builds if version), "")
    return Torch(str(torch.__version__), build, devices, hardware)


def storage(path: str) -> Storage:
    """Try what the files of a run need: fsync, rename, lock, HDF5; in a folder of our own that is removed again."""
    wanted = Path(path).absolute()
    folder = next(each for each in (wanted, *wanted.parents) if each.is_dir()).resolve()
    space = os.statvfs(folder)
    kind = file_system(folder, Path("/proc/self/mountinfo").read_text())
    try:
        with tempfile.TemporaryDirectory(prefix=".gyre-doctor-", dir=folder) as scratch:
            steps = dict(_steps(Path(scratch)))
    except OSError as error:
        steps = {"write": error.strerror or str(error)}
    return Storage(str(folder), kind, space.f_bavail * space.f_frsize, steps)


def _steps(scratch: Path) -> Iterator[tuple[str, str]]:
    for name, step in (("fsync", _fsync), ("rename", _rename), ("lock", _lock), ("hdf5", _hdf5)):
        try:
            step(scratch)
        except OSError as error:
            yield name, error.strerror or str(error)
        else:
            yield name, ""


def _fsync(scratch: Path) -> None:
    with (scratch / "a").open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())


def _rename(scratch: Path) -> None:
    _fsync(scratch)
    (scratch / "b").write_bytes(b"old")
    (scratch / "a").rename(scratch / "b")
    if (scratch / "b").stat().st_size != 4096:
        raise OSError("a renamed file has its old content")


def _lock(scratch: Path) -> None:
    with (scratch / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _hdf5(scratch: Path) -> None:
    """As shards are written and read: without HDF5's own locks."""
    import h5py

    with h5py.File(scratch / "shard.h5", "w", locking=False) as file:
        file["x"] = list(range(1000))
    with h5py.File(scratch / "shard.h5", "r", locking=False) as file:
        if int(file["x"][999]) != 999:
            raise OSError("HDF5 read back something else")


def file_system(folder: Path, mountinfo: str) -> str:
    """Type of the file system that holds `folder`: that of the longest mount point above it, the last where several are equal."""
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        mounted, _, rest = line.partition(" - ")
        point = mounted.split()[4].encode().decode("unicode_escape")
        if folder.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), rest.split()[0]
    return kind


def mpi() -> Mpi:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    first = MPI.Get_library_version().strip("\x00\n ").splitlines()[0]
    return Mpi(" ".join(first.split()))


def world() -> World:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return World(comm.Get_rank(), comm.Get_size())


def sandbox() -> Sandbox:
    from gyre_hpc.executions import sandbox as sandboxes

    possible, why = sandboxes.available()
    return Sandbox("" if possible else why, sandboxes.enabling_command())


def accepted(folder: str) -> Accepted:
    try:
        return Accepted(read_site(Path(folder)))
    except CorruptRecord as error:
        return Accepted(why=error.message)


PROBES: Final[dict[str, Callable[..., object]]] = {
    "torch": torch_,
    "storage": storage,
    "mpi": mpi,
    "world": world,
    "sandbox": sandbox,
    "accepted": accepted,
}


def main(name: str, *arguments: str) -> None:
    sys.stdout.write(msgspec.json.encode(PROBES[name](*arguments)).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
