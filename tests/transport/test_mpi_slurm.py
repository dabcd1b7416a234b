"""MPI channels and regions between real endpoints: steps of a real Slurm of four nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from gyre_hpc.launch.slurm import SlurmLauncher
from tests.launch.cluster import running_cluster
from tests.transport.mpi_run import allocate, check_exchange, mpi_run

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[SlurmLauncher]:
    pytest.importorskip("mpi4py", reason="needs the extra mpi; enable: pip install 'gyre_hpc[mpi]'")
    with running_cluster("mpi", nodes=4, cpus=4, gpus=0, port=18065):
        job, launcher = allocate(4)
        yield launcher
        subprocess.run(["scancel", job], check=False)


async def test_two_cells_join_and_messages_and_regions_go_over_mpi(launcher: SlurmLauncher) -> None:
    async with mpi_run(launcher) as run:
        await check_exchange(run)
