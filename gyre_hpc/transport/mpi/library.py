"""The MPI library of this process: loaded without being initialised, judged, then initialised. Only endpoints import it.

Nothing is finalised: an endpoint leaves by `os._exit`, because finalising beside a dead peer may never return. What
MPI_Finalize would remove is removed at the start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

__all__ = ["MPI", "initialise", "name", "unfit_library", "unfit_world"]

CMA_SEGMENT: Final = "16m"
"""UCX copies so much of another process's memory at once, on one host; its own 512k costs a third of the speed."""
JOINERS: Final = ("mpich", "intel", "cray", "mvapich")
"""Words in the description of libraries that can connect separately started steps (the MPICH family)."""
SEGMENTS: Final = "/dev/shm/mpich_shm_"
MANAGED: Final = ("PMI_", "PALS_")
"""Variables that srun's plugins for the MPICH family set; without them every process is a world of its own."""


def name() -> str:
    """First line of the library's own description."""
    return " ".join(str(MPI.Get_library_version()).splitlines()[0].replace("\x00", "").split())


def unfit_library(library: str, plugin: str, env: Mapping[str, str]) -> str:
    """Why this library, started by `srun --mpi=PLUGIN`, cannot join other steps; "" if it can. Asked before MPI_Init."""
    if not any(word in library.lower() for word in JOINERS):
        return (
            f"{library} under srun --mpi={plugin} cannot connect separately started steps; "
            "use MPICH (pip install mpich, or MPI4PY_LIBMPI=FILE of the site's) with cluster.mpi_plugin=pmi2"
        )
    if not any(key.startswith(MANAGED) for key in env):
        return (
            f"{library} was given no PMI by srun --mpi={plugin}, its processes are worlds of their own; "
            "set cluster.mpi_plugin=pmi2 (or the plugin your site names for it: srun --mpi=list)"
        )
    return ""


def initialise() -> None:
    """MPI_Init for calls of the main thread alone; errors are returned, not fatal."""
    os.environ.setdefault("UCX_CMA_SEG_SIZE", CMA_SEGMENT)
    MPI.Init_thread(MPI.THREAD_FUNNELED)
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
    forget_names(Path("/proc/self/maps"))


def forget_names(maps: Path) -> None:
    """Unlink MPICH's shared memory of this process, found in its memory map, so that no end of it leaves the files behind.

    The ranks of one step on one node attach to them while MPI starts; this step has one rank, and those of
    other steps are reached by the network module (MPICH 4 and 5, ch4).
    """
    found = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if SEGMENTS in line}
    for path in found:
        with contextlib.suppress(OSError):
            os.unlink(path)


def unfit_world(library: str, plugin: str, env: Mapping[str, str]) -> str:
    """Why the world is not the step that srun started; "" if it is."""
    expected, size = int(env.get("SLURM_NTASKS", "1")), MPI.COMM_WORLD.size
    if size == expected:
        return ""
    return f"{library} under srun --mpi={plugin} has a world of {size} in a step of {expected} tasks"
