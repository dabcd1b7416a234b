"""MPI channels and regions between real endpoints: steps of a real Slurm of four nodes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest

from gyre_hpc.launch.slurm import SlurmLauncher
from gyre_hpc.transport.messages import RegionKind
from tests.launch.cluster import PATIENCE_S, running_cluster
from tests.transport.mpi_run import allocate, mpi_run, until

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[SlurmLauncher]:
    pytest.importorskip("mpi4py", reason="needs the extra mpi; enable: pip install 'gyre_hpc[mpi]'")
    with running_cluster("mpi", nodes=4, cpus=4, gpus=0, port=18065):
        job, launcher = allocate(4)
        yield launcher
        subprocess.run(["scancel", job], check=False)


async def test_two_cells_join_and_messages_and_regions_go_over_mpi(launcher: SlurmLauncher) -> None:
    """Then the bridge is killed: nothing is lost, nothing comes twice, and the cells join again."""
    async with mpi_run(launcher) as run:
        await run.joined(0, 1)
        for index in (0, 1):
            run.talk(index, 0, 50)
            await run.heard(index, 50)
            assert run.carried(index) >= 100
        owner, puller = run.cells[0].regions, run.cells[1].regions
        weights = {"w": np.random.default_rng(0).random(3_000_000), "none": np.empty((0, 2))}
        manifest = owner.publish(RegionKind.WEIGHTS, "policy", 1, "", weights)
        arrays = await puller.pull(manifest, deadline_s=PATIENCE_S)
        np.testing.assert_array_equal(arrays["w"], weights["w"])
        assert puller.ways == {"mpi": 1}
        run.talk(0, 50, 60)
        os.kill(run.endpoint_pid("controller"), signal.SIGKILL)
        run.talk(0, 60, 90)
        await until("the downgrade", lambda: not run.up(0) and not run.up(1))
        run.talk(0, 90, 100)
        await run.heard(0, 100)
        assert any("cell-1: MPI channel lost" in fault for fault in run.faults)
        await run.joined(0, 1)
        run.talk(0, 100, 110)
        await run.heard(0, 110)
